"""Fast decoding steps: decoder layers in C++, a whole model in C++, and fused norms on a GPU."""
