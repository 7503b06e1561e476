"""Fused lm_head and cross entropy over chunks of positions.

    loss = sum over target positions of logsumexp(h W^T) - (h W^T)[label]

The logits are computed only for target positions (label != -100), one chunk at a time (chunks.py). `token_logprobs`
returns the log-probability of each label, for losses that weight tokens differently. A soft-cap replaces each logit x
with softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118).

A low-rank update of W is passed as factors, so that neither W + B A nor its gradient is materialized:

    logits = h W^T + u B^T        u = s h A^T, [T, K], with the scaling s

Shapes: T positions, R target positions, D hidden size, V vocabulary size, K rank of an update.
"""

from __future__ import annotations

import functools

import paddle

from paddlenlp_ext.ops.cpp.library import usable, with_products
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.linear_cross_entropy.chunks import (
    CPP,
    PADDLE,
    Updates,
    logprobs_of_losses,
    losses_by_chunks,
    sum_of_losses,
)
from paddlenlp_ext.ops.linear_cross_entropy.sharded_vocabulary import sharded_products_reference
from paddlenlp_ext.ops.linear_cross_entropy.triton import TRITON, sharded_products_triton
from paddlenlp_ext.ops.triton_utils.launch import on_gpu_with_triton


def linear_cross_entropy(
    hidden_TD: paddle.Tensor,
    weight_VD: paddle.Tensor,
    labels_T: paddle.Tensor,
    chunk: int | None = None,
    implementation: str | None = None,
    softcap: float | None = None,
    updates: Updates = (),
) -> tuple[paddle.Tensor, int]:
    """Return the summed cross entropy of `hidden @ weight^T` and the number of correct predictions.

    Args:
        hidden_TD: [T, D].
        weight_VD: [V, D]; a frozen weight gets no gradient.
        labels_T: [T]; -100 marks positions without a target.
        chunk: target positions per chunk; the logits [chunk, V] are the largest tensor. None: 384 positions in C++ with
            bfloat16, with Triton as many positions as fit in 512 MB, otherwise 256.
        implementation: backend: "cpp", "triton" or "reference"; None: the best available backend.
        softcap: bound of the logits; None: no bound.
        updates: pairs of u [T, K] and B [V, K], whose products u B^T are added to the logits.

    Returns:
        The loss sum (an fp32 scalar, 0 without targets) and the number of correct predictions.
    """
    run = functools.partial(linear_cross_entropy_op.choose(hidden_TD, implementation), softcap=softcap)
    return sum_of_losses(run, hidden_TD, weight_VD, labels_T, chunk, updates)


def token_logprobs(
    hidden_TD: paddle.Tensor,
    weight_VD: paddle.Tensor,
    labels_T: paddle.Tensor,
    chunk: int | None = None,
    implementation: str | None = None,
    softcap: float | None = None,
    updates: Updates = (),
) -> paddle.Tensor:
    """Return the log-probability of each label under softmax(hidden @ weight^T), fp32 [T]; 0 where the label is -100.

    See `linear_cross_entropy` for the arguments. If the weight or a matrix B is trained, the backward pass recomputes
    the logits, because each position has a different gradient.
    """
    run = functools.partial(linear_cross_entropy_op.choose(hidden_TD, implementation), softcap=softcap)
    return logprobs_of_losses(run, hidden_TD, weight_VD, labels_T, chunk, updates)


linear_cross_entropy_op = DispatchedOp(
    "linear_cross_entropy",
    cpp=(functools.partial(losses_by_chunks, CPP), with_products(usable)),
    triton=(functools.partial(losses_by_chunks, TRITON), on_gpu_with_triton),
    reference=functools.partial(losses_by_chunks, PADDLE),
)
sharded_products_op = DispatchedOp(
    "vocabulary-parallel cross entropy",
    triton=(sharded_products_triton, on_gpu_with_triton),
    reference=sharded_products_reference,
)
"""Op for a sharded vocabulary; backends map `VocabShards` to `Products`."""
