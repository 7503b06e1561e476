"""AWQ (Lin et al. 2023, arXiv:2306.00978): scale channels with large inputs before rounding, and clip ranges.

    y = Q(W diag(s)) diag(s)^-1 x,   s = mean|x|^a          a in [0, 1) that minimizes the output error

diag(s)^-1 is folded into the norm or linear layer that computes x. The output error that a weight error D causes is
computed from the second moments H of the inputs: |X D^T|^2 = trace(D H D^T).

Shapes: O outputs, I inputs, G groups per row, K inputs per group.
"""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.rtn import round_to_nearest

_EXPONENTS = tuple(step / 20 for step in range(20))
_SHRINKS = tuple(1 - step / 20 for step in range(11))
_SEARCH_ROWS = 512
"""Number of weight rows used to compare exponents; with more rows, the selected exponent rarely changes."""


def search_scales(
    weight_OI: np.ndarray,
    hessian_II: np.ndarray,
    magnitudes_C: np.ndarray,
    integers: IntegerFormat,
    channel_of_input: np.ndarray,
) -> np.ndarray:
    """Return the channel scales, float32 [C], with the smallest output error among the searched exponents a.

    Args:
        weight_OI: concatenated weight rows of all linear layers with these inputs.
        hessian_II: X^T X of the inputs, or a multiple of it.
        magnitudes_C: mean magnitude of each channel.
        integers: format of the rounded weight.
        channel_of_input: channel of each input, int [I]; in o_proj, query heads with the same value head share
            channels.

    Raises:
        ValueError: the weight does not fit the format (`IntegerFormat`).
    """
    rows = np.unique(np.linspace(0, len(weight_OI) - 1, min(len(weight_OI), _SEARCH_ROWS)).astype(int))
    weight_OI = weight_OI[rows]
    best, least = np.ones_like(magnitudes_C), np.inf
    for exponent in _EXPONENTS:
        scales_C = np.maximum(magnitudes_C, 1e-4) ** np.float32(exponent)
        scales_C = (scales_C / np.sqrt(scales_C.max() * scales_C.min())).astype(np.float32)
        scales_I = scales_C[channel_of_input]
        rounded_OI = round_to_nearest(weight_OI * scales_I, integers).dequantized() / scales_I
        error = output_error(rounded_OI - weight_OI, hessian_II)
        if error < least:
            best, least = scales_C, error
    return best


def search_clipping(weight_OI: np.ndarray, hessian_II: np.ndarray, integers: IntegerFormat) -> np.ndarray:
    """Return the clipping factor of each group's range, float32 [O, G], that minimizes the group's output error.

    Args:
        weight_OI: the weight, float32.
        hessian_II: X^T X of the inputs, or a multiple of it.
        integers: format of the rounded weight.

    Raises:
        ValueError: the weight does not fit the format (`IntegerFormat`).
    """
    outputs, inputs = weight_OI.shape
    group = integers.group_of(inputs)
    blocks_GKK = np.stack([hessian_II[i : i + group, i : i + group] for i in range(0, inputs, group)])
    best = np.ones((outputs, inputs // group), np.float32)
    least = np.full(best.shape, np.inf)
    for shrink in _SHRINKS:
        difference_OI = round_to_nearest(weight_OI, integers, shrink).dequantized() - weight_OI
        difference_GOK = difference_OI.reshape(outputs, -1, group).transpose(1, 0, 2)
        errors = np.einsum("gok,gok->og", difference_GOK @ blocks_GKK, difference_GOK)
        is_better = errors < least
        best[is_better], least = shrink, np.minimum(errors, least)
    return best


def output_error(difference_OI: np.ndarray, hessian_II: np.ndarray) -> float:
    """Return the squared output error trace(D H D^T) that a weight error D causes."""
    return float(np.einsum("oi,oi->", difference_OI @ hessian_II, difference_OI, dtype=np.float64))
