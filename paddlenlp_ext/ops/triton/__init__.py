"""GPU kernels in Triton, and what launches them on Paddle's tensors."""
