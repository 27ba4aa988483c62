"""What kernels share: configuration, shared-memory plans, tiles, barriers, products, numbers."""
