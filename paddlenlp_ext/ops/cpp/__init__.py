"""C++ library of CPU kernels: build, loading, and calls."""
