"""Names and shapes of tensors in files, where they differ from the parameters: experts, fused projections."""
