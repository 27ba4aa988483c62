"""The bridge from Python: find and register the C++ library, install kernels, make the calls."""
