"""What updates of the form B A share."""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_ext.sharding_spec import Style


def factor_axes(style: Style) -> tuple[int | None, int | None]:
    """The axes on which A [r, in] and B [out, r] are cut beside a base cut in `style`: B along the outputs, A along the
    inputs; None = whole.
    """
    axes: dict[str, tuple[int | None, int | None]] = {
        "colwise": (None, 0),
        "rowwise": (1, None),
        "replicated": (None, None),
    }
    assert style in axes, f"a linear is not cut {style}"
    return axes[style]


def take_ranks(tensor: paddle.Tensor, ranks: np.ndarray, axis: int) -> paddle.Tensor:
    """Those indices of the tensor along `axis`, none of them allowed, in its own format and to the bit."""
    return paddle.to_tensor(tensor.astype("float32").numpy().take(ranks, axis)).astype(tensor.dtype)
