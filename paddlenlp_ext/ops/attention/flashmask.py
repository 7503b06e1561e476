"""Attention by Paddle's FlashMask kernels (Wang et al. 2024, arXiv:2410.01359); requires a GPU.

Untested on a GPU: tests/ops/attention/test_flashmask.py compares the mask with the dense mask, and tests/ops/gpu passes
the calls through Paddle's inference of shapes. Paddle has two kernels behind one function:

    version   GPUs                                scale                   based on
    2         compute capability 8 and later      1 / sqrt(H)             FlashAttention 2
    3         compute capability 9 (Hopper)       an argument             FlashAttention 3

The kernels do not support a prefix, so a copy of the prefix is inserted before every document, as its first tokens.
This adds P positions per document; the other backends read a single copy. Documents that continue a parent read its
keys in place. With a prefix, or with a window (whose masks are not one range of queries per key), they get a copy too.
The kernels have one head dimension, a multiple of 8: narrower tensors are padded with zeros, and the padding's results
are cut off.

Shapes: B batch, S sequence, N query heads, K key-value heads, E positions with the copies, P prefix positions, X heads,
H head dimension.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.attention.layout import AttentionLayout, KeyValuePrefix

_VERSION_FLAG, _DETERMINISTIC_FLAG = "FLAGS_flash_attn_version", "FLAGS_cudnn_deterministic"
_HOPPER = 9
_HEAD_DIM_MULTIPLE = 8
_MAX_DETERMINISTIC_HEAD_DIM = 128


@dataclass(frozen=True)
class PrefixedDocuments:
    """One row of documents that each begin with copies of the prefix and of their parent.

    Attributes:
        prefix_length: P, which may be 0.
        layout: layout of the longer documents.
        sources: int64 [E], source of each position: one of the P prefix positions, followed by the B * S positions.
        own_positions: int64 [B * S], index of each of the documents' own positions.
    """

    prefix_length: int
    layout: AttentionLayout
    sources: paddle.Tensor
    own_positions: paddle.Tensor

    def insert(self, x_BSXH: paddle.Tensor, prefix_PXH: paddle.Tensor | None) -> paddle.Tensor:
        """Return [1, E, X, H] with the copies of the prefix; None inserts zeros, for queries."""
        rows = x_BSXH.flatten(0, 1)
        if prefix_PXH is None:
            prefix_PXH = paddle.zeros([self.prefix_length, *rows.shape[1:]], rows.dtype)
        return paddle.gather(paddle.concat([prefix_PXH, rows]), self.sources).unsqueeze(0)

    def gather(self, x_1EXH: paddle.Tensor, shape: Sequence[int]) -> paddle.Tensor:
        """Return the documents' own positions, reshaped to `shape`."""
        return paddle.gather(x_1EXH[0], self.own_positions).reshape(list(shape))


def prefixed_documents(layout: AttentionLayout, prefix_length: int) -> PrefixedDocuments:
    """Return the layout with a prefix of this length inserted; computed once per layout."""
    return layout.cached(("prefixed", prefix_length), lambda: _insert_prefixes(layout, prefix_length))


def _insert_prefixes(layout: AttentionLayout, prefix_length: int) -> PrefixedDocuments:
    starts, lengths = layout.documents()
    own = [prefix_length + np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    before = [np.arange(0) if parent < 0 else own[parent] for parent in layout.parents()]
    sources = [np.concatenate([np.arange(prefix_length), *pair]) for pair in zip(before, own, strict=True)]
    longer = AttentionLayout.from_documents([[len(positions) for positions in sources]], layout.window)
    ends = np.cumsum([len(positions) for positions in sources])
    own_positions = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return PrefixedDocuments(
        prefix_length,
        longer,
        paddle.to_tensor(np.concatenate(sources)),
        paddle.to_tensor(np.concatenate(own_positions)),
    )


def flashmask_attention(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKH: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
) -> paddle.Tensor:
    """Compute causal attention within each document, as `attention_reference` does."""
    if prefix is not None or (layout.document_parents is not None and layout.window is not None):
        k_PKH, v_PKH = (x[0, :0] for x in (k_BSKH, v_BSKH)) if prefix is None else prefix
        prefixed = prefixed_documents(layout, k_PKH.shape[0])
        q, k, v = prefixed.insert(q_BSNH, None), prefixed.insert(k_BSKH, k_PKH), prefixed.insert(v_BSKH, v_PKH)
        shape = [*q_BSNH.shape[:3], v_BSKH.shape[3]]
        return prefixed.gather(flashmask_attention(q, k, v, prefixed.layout, scale), shape)
    rows_B1S1 = layout.cached("flashmask", lambda: paddle.to_tensor(start_rows(layout), place=q_BSNH.place))
    value_dim = v_BSKH.shape[3]
    head_dim = -(-max(q_BSNH.shape[3], value_dim) // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE
    q_BSNH, k_BSKH, v_BSKH = (_padded(x, head_dim) for x in (q_BSNH, k_BSKH, v_BSKH))
    out_BSNH = _run_kernel(q_BSNH, k_BSKH, v_BSKH, rows_B1S1, scale)
    return out_BSNH[..., :value_dim] if value_dim < head_dim else out_BSNH


def _padded(x_BSXH: paddle.Tensor, head_dim: int) -> paddle.Tensor:
    """Append channels of zeros, which change no score."""
    missing = head_dim - x_BSXH.shape[3]
    if missing == 0:
        return x_BSXH
    return paddle.concat([x_BSXH, paddle.zeros([*x_BSXH.shape[:3], missing], x_BSXH.dtype)], axis=-1)


def _run_kernel(
    q_BSNH: paddle.Tensor, k_BSKH: paddle.Tensor, v_BSKH: paddle.Tensor, rows_B1S1: paddle.Tensor, scale: float
) -> paddle.Tensor:
    """Call Paddle's function with the scale as the kernel that it selects requires."""
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
    assert not isinstance(out_BSNH, list), "the kernel returns a list only if the softmax is requested"
    return out_BSNH


def kernel_version(head_dim: int) -> int:
    """Return the version of the kernel that Paddle's function selects.

    Paddle takes version 2 for large heads if results must be deterministic: the backward pass of version 3 is not.
    """
    _select_version()
    flags = paddle.get_flags([_VERSION_FLAG, _DETERMINISTIC_FLAG])
    if flags[_DETERMINISTIC_FLAG] and head_dim > _MAX_DETERMINISTIC_HEAD_DIM:
        return 2
    return int(flags[_VERSION_FLAG])


@functools.cache
def _select_version() -> None:
    """Set Paddle's flag for this GPU, once; a flag in the environment takes precedence."""
    if _VERSION_FLAG not in os.environ:
        major, _ = paddle.device.cuda.get_device_capability()
        paddle.set_flags({_VERSION_FLAG: 3 if major == _HOPPER else 2})


def start_rows(layout: AttentionLayout) -> np.ndarray:
    """Return int32 [B, 1, S, 1]: for each key, the first later query of the row that does not attend to it.

    With `causal`, FlashMask masks a key for all earlier queries, and from the returned query on. The returned query is
    the end of the key's document and of those that continue it, or the first query whose window excludes the key.
    """
    starts, lengths = layout.documents()
    ends, parents = starts + lengths, layout.parents()
    np.maximum.at(ends, parents[parents >= 0], (starts + lengths)[parents >= 0])  # branches follow their parent
    rows_B1 = np.arange(len(layout.document_lengths))[:, None]
    ends_BS = np.repeat(ends, lengths).reshape([len(rows_B1), layout.row_length]) - rows_B1 * layout.row_length
    if layout.window is not None:
        ends_BS = np.minimum(ends_BS, np.arange(layout.row_length) + layout.window)
    return ends_BS.astype(np.int32)[:, None, :, None]
