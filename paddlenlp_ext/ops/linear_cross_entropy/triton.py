"""Cross entropy of the lm_head with Triton kernels on a GPU; Paddle computes the matmuls.

The logits stay in the dtype of the matmuls, and one kernel overwrites the logits of a chunk with their gradient. The
CPU does not synchronize with the GPU between chunks.

Tested in Triton's interpreter on the CPU (tests/ops/linear_cross_entropy/test_triton.py), except for the launch itself.
Not yet run on a GPU with Paddle.

Shapes: R rows of a chunk, V vocabulary size, U size of this process's shard of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import paddle

from paddlenlp_ext.ops.linear_cross_entropy.chunks import PADDLE, Products
from paddlenlp_ext.ops.linear_cross_entropy.sharded_vocabulary import VocabShards
from paddlenlp_ext.ops.triton_utils.launch import launch

_CHUNK_BYTES = 1 << 29
"""Maximum size of a chunk's logits in bytes."""
_CHUNK_STEP = 256
"""The number of rows per chunk is a multiple of this number, so that matmul tiles are full."""


def chunk_rows(num_columns: int, element_size: int) -> int:
    """Return the number of rows per chunk: as many as `_CHUNK_BYTES` allows, but at least `_CHUNK_STEP`.

    With 2048 rows, reading a weight [128256, 4096] takes a fifth of the time of the multiplications.
    """
    return max(1, _CHUNK_BYTES // (num_columns * element_size * _CHUNK_STEP)) * _CHUNK_STEP


def cross_entropy_triton(
    logits_RV: paddle.Tensor, targets_R: paddle.Tensor, with_gradient: bool, softcap: float | None = None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `cross_entropy_` for contiguous logits in any precision.

    Returns:
        The losses, fp32 [R], and the number of correct predictions as a scalar on the GPU. For a target outside the
        vocabulary the loss is NaN; an error would require synchronization with the GPU.
    """
    from paddlenlp_ext.ops.linear_cross_entropy.kernels import launch_cross_entropy

    losses_R, correct_R = _empty(logits_RV, "float32"), _empty(logits_RV, "int32")
    launch_cross_entropy(launch, logits_RV, targets_R.astype("int64"), losses_R, correct_R, with_gradient, softcap)
    return losses_R, correct_R.sum()


def sharded_products_triton(shards: VocabShards) -> Products:
    """Return the Triton functions for the matmuls and the cross entropy of an lm_head with a sharded vocabulary."""

    def cross_entropy(
        logits_RU: paddle.Tensor, labels_R: paddle.Tensor, with_gradient: bool, _: object, softcap: float | None
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        return _sharded_cross_entropy(shards, logits_RU, labels_R, with_gradient, softcap)

    return dataclasses.replace(
        TRITON,
        chunk=lambda weight: chunk_rows(shards.largest_size, weight.element_size()),  # equal on all processes
        cross_entropy=cross_entropy,
        complete_hidden=shards.sum,
    )


def _sharded_cross_entropy(
    shards: VocabShards, logits_RU: paddle.Tensor, labels_R: paddle.Tensor, with_gradient: bool, softcap: float | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    from paddlenlp_ext.ops.linear_cross_entropy.kernels import launch_row_gradient, launch_row_statistics

    targets_R = labels_R.astype("int64") - shards.start
    picked_R, own_largest_R, own_sums_R = (_empty(logits_RU, "float32") for _ in range(3))
    own_first_R = _empty(logits_RU, "int64")
    launch_row_statistics(launch, logits_RU, targets_R, (picked_R, own_largest_R, own_first_R, own_sums_R), softcap)
    largest_R, first_R = shards.largest(own_largest_R, own_first_R)
    sums_2R = shards.sum(paddle.stack([own_sums_R * (own_largest_R - largest_R).exp(), picked_R]))
    if with_gradient:
        launch_row_gradient(launch, logits_RU, targets_R, largest_R, sums_2R[0].contiguous(), softcap)
    return sums_2R[0].log() + largest_R - sums_2R[1], (first_R == labels_R).sum()


def _empty(logits_RV: paddle.Tensor, dtype: Any) -> paddle.Tensor:
    return paddle.empty(logits_RV.shape[:1], dtype, device=logits_RV.place)


TRITON = dataclasses.replace(
    PADDLE,
    chunk=lambda weight: chunk_rows(weight.shape[0], weight.element_size()),
    cross_entropy=lambda logits_RV, targets_R, with_gradient, _, softcap: cross_entropy_triton(
        logits_RV, targets_R, with_gradient, softcap
    ),
    float32_logits=False,
)
