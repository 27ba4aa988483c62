"""CuTeDSL sources of the kernels, by architecture; needed at build time only.

Nothing is imported here: the modules below need nvidia-cutlass-dsl, a running program does not.
"""
