"""Two GPUs without hardware: a library in place of CUDA's driver, and launches of Triton kernels over it."""
