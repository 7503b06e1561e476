"""The C++ library of CPU kernels: built, loaded and called."""
