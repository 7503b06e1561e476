"""Round to nearest (RTN): round each weight independently, with a scale and a zero point for each group of inputs.

RTN needs no calibration data. AWQ rounds its scaled and clipped weights in the same way. The error of RTN is reported
for comparison with the error of GPTQ or AWQ.

Shapes: O outputs, I inputs, G groups per row, K inputs per group.
"""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat, IntegerWeight


def round_to_nearest(
    weight_OI: np.ndarray, integers: IntegerFormat, shrink_OG: float | np.ndarray = 1.0
) -> IntegerWeight:
    """Round each weight to the nearest value of the format.

    Args:
        weight_OI: the weight, float32.
        integers: format of the result.
        shrink_OG: clipping factor of each group's range.

    Raises:
        ValueError: the weight does not fit the format (`IntegerFormat`).
    """
    values_OGK = weight_OI.reshape(len(weight_OI), -1, integers.group_of(weight_OI.shape[1]))
    scales, zeros = integers.fit(values_OGK, shrink_OG)
    codes = integers.codes(values_OGK, scales[..., None], zeros[..., None])
    return IntegerWeight(codes.reshape(weight_OI.shape).astype(np.int8), scales, zeros)
