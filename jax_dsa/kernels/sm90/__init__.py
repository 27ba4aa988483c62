"""Kernels for compute capability 9.0 (target sm_90a)."""
