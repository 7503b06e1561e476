"""Attention with Paddle's FlashMask kernels (Wang et al. 2024, arXiv:2410.01359); requires a GPU.

Not yet run on a GPU: tests/ops/attention/test_flashmask.py compares the mask with a dense mask, and tests/ops/gpu
checks the calls with Paddle's shape inference. One Paddle function selects between two kernels:

    version   GPUs                                scale                   based on
    2         compute capability 8 and higher     1 / sqrt(H)             FlashAttention 2
    3         compute capability 9 (Hopper)       an argument             FlashAttention 3

The mask of the kernels stores one range of queries per key. One range per key cannot represent prefixes and some parent
documents, so their keys and values are copied into each document that attends to them (start_rows.py). The kernels need
the same head dimension for q, k and v, a multiple of 8. Narrower tensors are padded with zeros, and the outputs are
truncated.

Shapes: B batch, S sequence, N query heads, K key-value heads, X heads, H head dimension of queries and keys, E head
dimension of values.
"""

from __future__ import annotations

import functools
import math
import os

import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.attention.document_layout import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention.start_rows import attend_in_copies, start_rows_on

_VERSION_FLAG, _DETERMINISTIC_FLAG = "FLAGS_flash_attn_version", "FLAGS_cudnn_deterministic"
_HOPPER = 9
_HEAD_DIM_MULTIPLE = 8
_MAX_DETERMINISTIC_HEAD_DIM = 128
MAX_HEAD_DIM = 256
"""Largest head dimension that the kernels support."""


def flashmask_attention(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKE: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
) -> paddle.Tensor:
    """Compute `attention` with FlashMask."""
    attend = functools.partial(_attend, scale)
    return attend_in_copies(attend, (q_BSNH, k_BSKH, v_BSKE), layout, prefix)


def _attend(
    scale: float, q_BSNH: paddle.Tensor, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, layout: AttentionLayout
) -> paddle.Tensor:
    value_dim = v_BSKE.shape[3]
    head_dim = -(-max(q_BSNH.shape[3], value_dim) // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE
    q_BSNH, k_BSKH, v_BSKH = (_padded(x, head_dim) for x in (q_BSNH, k_BSKH, v_BSKE))
    out_BSNH = _run_kernel(q_BSNH, k_BSKH, v_BSKH, start_rows_on(q_BSNH.place, layout), scale)
    return out_BSNH[..., :value_dim] if value_dim < head_dim else out_BSNH


def _padded(x_BSXH: paddle.Tensor, head_dim: int) -> paddle.Tensor:
    """Append zero channels, which do not change the scores."""
    missing = head_dim - x_BSXH.shape[3]
    if missing == 0:
        return x_BSXH
    return paddle.concat([x_BSXH, paddle.zeros([*x_BSXH.shape[:3], missing], x_BSXH.dtype)], axis=-1)


def _run_kernel(
    q_BSNH: paddle.Tensor, k_BSKH: paddle.Tensor, v_BSKH: paddle.Tensor, rows_B1S1: paddle.Tensor, scale: float
) -> paddle.Tensor:
    """Call Paddle's function; q is scaled first if the selected kernel has no scale argument."""
    head_dim = q_BSNH.shape[-1]
    takes_scale = kernel_version(head_dim) >= 3
    if not takes_scale and not math.isclose(scale, head_dim**-0.5):
        q_BSNH = q_BSNH * (scale * head_dim**0.5)
    out_BSNH = F.flashmask_attention(
        q_BSNH,
        k_BSKH,
        v_BSKH,
        startend_row_indices=rows_B1S1,
        causal=True,
        softmax_scale=scale if takes_scale else None,
    )
    assert not isinstance(out_BSNH, list), "the kernel must return one tensor if the softmax is not requested"
    return out_BSNH


def kernel_version(head_dim: int) -> int:
    """Return the version of the kernel that Paddle's function selects.

    If results must be deterministic, Paddle selects version 2 for large heads, because the backward pass of version 3
    is not deterministic for large heads.
    """
    _select_version()
    flags = paddle.get_flags([_VERSION_FLAG, _DETERMINISTIC_FLAG])
    if flags[_DETERMINISTIC_FLAG] and head_dim > _MAX_DETERMINISTIC_HEAD_DIM:
        return 2
    return int(flags[_VERSION_FLAG])


@functools.cache
def _select_version() -> None:
    """Set the Paddle flag that selects the kernel version for this GPU, unless the environment sets the flag."""
    if _VERSION_FLAG not in os.environ:
        major, _ = paddle.device.cuda.get_device_capability()
        paddle.set_flags({_VERSION_FLAG: 3 if major == _HOPPER else 2})
