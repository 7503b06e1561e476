"""Numerical stability of training: NaN and loss spikes, rollback, fp16 loss scale, float32 gradients."""
