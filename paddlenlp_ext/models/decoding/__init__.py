"""Fast decoding steps, which replace many ops with few calls: C++ layers, a C++ model, fused norms on a GPU."""
