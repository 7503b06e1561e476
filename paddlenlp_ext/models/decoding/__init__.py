"""Decoding steps that replace many ops by few calls: C++ layers, a C++ model, fused norms on a GPU."""
