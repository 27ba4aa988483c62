"""Compiled kernels: the schema of their manifest."""
