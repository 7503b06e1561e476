"""The loss of a micro-batch: a sum over its learned tokens, which the trainer divides by the whole window's number.

Shapes: B batch, S sequence, T tokens (B * S), D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import paddle

from paddlenlp_ext.data.collate import PackedBatch
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from paddlenlp_ext.train.hooks import reads_prompts


def loss_sum(model: Any, batch: PackedBatch) -> tuple[paddle.Tensor, Any]:
    """Cross entropy summed over the learned tokens of the batch, and how many of them argmax gets right."""
    return loss_of_hidden(model, hidden_states(model, batch), batch)


def hidden_states(model: Any, batch: PackedBatch) -> paddle.Tensor:
    """What the head reads, [B, S, D]."""
    return model.hidden_states(
        paddle.to_tensor(batch.input_ids),
        position_ids=paddle.to_tensor(batch.position_ids),
        document_lengths=batch.document_lengths,
        **({"prompt_lengths": batch.prompt_lengths} if reads_prompts(model) else {}),
    )


def loss_of_hidden(model: Any, hidden_BSD: paddle.Tensor, batch: PackedBatch) -> tuple[paddle.Tensor, Any]:
    """The rest of `loss_sum`. The logits never stand as a whole (ops/linear_cross_entropy/__init__.py)."""
    hidden_TD = hidden_BSD.reshape([-1, hidden_BSD.shape[-1]])
    labels_T = paddle.to_tensor(batch.labels).reshape([-1])
    cross_entropy = linear_cross_entropy if model.vocabulary is None else model.vocabulary.cross_entropy
    return cross_entropy(hidden_TD, model.head_weight(), labels_T)
