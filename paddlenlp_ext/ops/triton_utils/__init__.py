"""Code that Triton kernels share: launch without PyTorch, tile sizes, weight tiles, column sums."""
