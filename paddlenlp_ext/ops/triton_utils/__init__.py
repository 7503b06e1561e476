"""Parts that Triton kernels share: launch without PyTorch, tile sizes, weight tiles, sums of columns."""
