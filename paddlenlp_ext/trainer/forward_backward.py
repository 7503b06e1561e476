"""Forward and backward passes of the micro-batches of a step, in sequence or through a pipeline.

Shapes: B batch, S sequence, T tokens (B * S), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import paddle

from paddlenlp_ext.data.collate import PackedBatch
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from paddlenlp_ext.parallel.pipeline.runtime import Pipeline


@dataclass(frozen=True)
class ScaledBatch:
    """Micro-batch of a training step, with the factor of its loss.

    Attributes:
        batch: arrays of the micro-batch.
        scale: factor of the loss sum before the backward pass; a micro-batch of scale 0 does not count.
        context: returns the context of the forward pass: random seed, number format, noise.
    """

    batch: PackedBatch
    scale: float
    context: Callable[[], AbstractContextManager[Any]]


def loss_sum(model: TrainableModel, batch: PackedBatch) -> tuple[paddle.Tensor, Any]:
    """Return the cross entropy summed over the target tokens of a batch, and the number of correct predictions."""
    return loss_of_hidden(model, hidden_states(model, batch), batch)


def hidden_states(model: TrainableModel, batch: PackedBatch) -> paddle.Tensor:
    """Return the hidden states [B, S, D] of a batch, the input of lm_head."""
    return model.hidden_states(
        paddle.to_tensor(batch.input_ids),
        position_ids=paddle.to_tensor(batch.position_ids),
        document_lengths=batch.document_lengths,
        **({"prompt_lengths": batch.prompt_lengths} if model.reads_prompts else {}),
    )


def loss_of_hidden(model: TrainableModel, hidden_BSD: paddle.Tensor, batch: PackedBatch) -> tuple[paddle.Tensor, Any]:
    """Return the result of `loss_sum`, given the hidden states.

    The full logits never exist at one time (ops/linear_cross_entropy/__init__.py).
    """
    hidden_TD = hidden_BSD.reshape([-1, hidden_BSD.shape[-1]])
    labels_T = paddle.to_tensor(batch.labels).reshape([-1])
    cross_entropy = linear_cross_entropy if model.vocab_parallel is None else model.vocab_parallel.cross_entropy
    return cross_entropy(hidden_TD, model.head_weight(), labels_T)


class ForwardBackward(Protocol):
    """Schedule of the micro-batches of one process."""

    def run(self, micro_batches: Sequence[ScaledBatch], after_micro_batch: Callable[[], None]) -> paddle.Tensor:
        """Accumulate the gradients of the micro-batches.

        Args:
            micro_batches: the micro-batches, with their scales.
            after_micro_batch: called after the forward and backward pass of a micro-batch.

        Returns:
            The sum of the unscaled losses that this process computed; 0 on a pipeline stage without lm_head.
        """
        ...

    def evaluate(self, batch: PackedBatch) -> tuple[float, int]:
        """Return the loss sum and the number of correct predictions of a batch, both 0 if another process has them."""
        ...


class SequentialSchedule:
    """Micro-batches in sequence, on a process that has all layers."""

    def __init__(self, model: TrainableModel) -> None:
        self.model = model

    def run(self, micro_batches: Sequence[ScaledBatch], after_micro_batch: Callable[[], None]) -> paddle.Tensor:
        """Accumulate the gradients of the micro-batches; see `ForwardBackward.run`."""
        total = paddle.zeros([], "float32")
        for micro_batch in micro_batches:
            with micro_batch.context():
                loss, _ = loss_sum(self.model, micro_batch.batch)
            (loss * micro_batch.scale).backward()
            after_micro_batch()
            if micro_batch.scale:
                total += loss.detach()
        return total

    def evaluate(self, batch: PackedBatch) -> tuple[float, int]:
        """Return the loss sum and the number of correct predictions of a batch."""
        loss, num_correct = loss_sum(self.model, batch)
        return float(loss), int(num_correct)


class PipelineSchedule:
    """Micro-batches interleaved over the stages of a pipeline (parallel/pipeline/runtime.py).

    Args:
        model: model whose decoder runs this stage.
        pipeline: stage of this process.
    """

    def __init__(self, model: TrainableModel, pipeline: Pipeline) -> None:
        self.model, self.pipeline = model, pipeline

    def run(self, micro_batches: Sequence[ScaledBatch], after_micro_batch: Callable[[], None]) -> paddle.Tensor:
        """Accumulate the gradients of the micro-batches; `after_micro_batch` is called once, after all of them."""
        total = paddle.zeros([], "float32")

        def forward(number: int, is_last_chunk: bool) -> paddle.Tensor | None:
            nonlocal total
            micro_batch = micro_batches[number]
            with micro_batch.context():
                hidden_BSD = hidden_states(self.model, micro_batch.batch)
                if not is_last_chunk:
                    return None
                loss, _ = loss_of_hidden(self.model, hidden_BSD, micro_batch.batch)
            total = total + loss.detach()
            return loss * micro_batch.scale

        self.pipeline.run(self._shapes([micro_batch.batch for micro_batch in micro_batches]), forward, training=True)
        after_micro_batch()
        return total

    def evaluate(self, batch: PackedBatch) -> tuple[float, int]:
        """Return the loss sum and the number of correct predictions; both are 0 on all stages but the last.

        Earlier stages continue with the next batch in the meantime.
        """
        measured = (0.0, 0)

        def forward(number: int, is_last_chunk: bool) -> None:
            nonlocal measured
            hidden_BSD = hidden_states(self.model, batch)
            if is_last_chunk:
                loss, num_correct = loss_of_hidden(self.model, hidden_BSD, batch)
                measured = (float(loss), int(num_correct))

        self.pipeline.run(self._shapes([batch]), forward, training=False)
        return measured

    def _shapes(self, batches: Sequence[PackedBatch]) -> list[list[int]]:
        return [self.model.hidden_states_shape(*batch.input_ids.shape) for batch in batches]


def build_forward_backward(model: TrainableModel, pipeline: Pipeline | None) -> ForwardBackward:
    """Build the schedule of a process: sequential, or through a pipeline."""
    return SequentialSchedule(model) if pipeline is None else PipelineSchedule(model, pipeline)
