"""Causal convolution in NumPy with its gradients, as the definition for the tests."""

from __future__ import annotations

import numpy as np


def formula(
    x_ND: np.ndarray, weight_DL: np.ndarray, bias_D: np.ndarray, taps_TL: np.ndarray, gradient_TD: np.ndarray
) -> list[np.ndarray]:
    """Return the convolution and the gradients of x, the weight and the bias, in float64."""
    x_ND, weight_DL, gradient_TD = (each.astype(np.float64) for each in (x_ND, weight_DL, gradient_TD))
    padded_MD = np.concatenate([x_ND, np.zeros_like(x_ND[:1])])
    y_TD, x_gradient = np.zeros_like(gradient_TD) + bias_D, np.zeros_like(padded_MD)
    for tap, weight_D in enumerate(weight_DL.T):
        y_TD += padded_MD[taps_TL[:, tap]] * weight_D
        np.add.at(x_gradient, taps_TL[:, tap], gradient_TD * weight_D)
    weight_gradient = np.stack([(gradient_TD * padded_MD[each]).sum(0) for each in taps_TL.T], axis=1)
    return [y_TD, x_gradient[:-1], weight_gradient, gradient_TD.sum(0)]
