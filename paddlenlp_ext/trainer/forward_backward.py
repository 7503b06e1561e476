"""Forward and backward passes of the micro-batches of a step, in sequence or through a pipeline.

Shapes: B batch, S sequence, T tokens (B * S), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.data.collate import PackedBatch
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.parallel.pipeline.runtime import Pipeline
from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy


@dataclass(frozen=True)
class ScaledBatch:
    """Micro-batch of a training step, and the factor of its loss.

    Attributes:
        batch: arrays of the micro-batch.
        scale: factor that multiplies the loss sum; 0 also excludes the micro-batch from the reported loss and metrics.
        context: function that returns the context manager of the forward pass, which sets random seed, compute dtype
            and noise.
    """

    batch: PackedBatch
    scale: float
    context: Callable[[], AbstractContextManager[Any]]


_MAX_LOSS_SHARE = 0.9
"""Maximum fraction of positions in the loss at which the last layer skips the feed-forward network for the others.
Above this fraction, copying the rows takes longer than the skipped computation."""

Measure = Callable[[TrainableModel, paddle.Tensor, Any], tuple[paddle.Tensor, np.ndarray]]
"""Type of `Objective.measure`: model, hidden states [B, S, D] and batch -> loss and metric sums."""


def loss_sum(model: TrainableModel, batch: PackedBatch) -> tuple[paddle.Tensor, int]:
    """Return the cross entropy summed over the target tokens of a batch, and the number of correct predictions."""
    loss, sums = CrossEntropy().measure(model, hidden_states(model, batch), batch)
    return loss, int(sums[0])


def hidden_states(model: TrainableModel, batch: PackedBatch) -> paddle.Tensor:
    """Return the hidden states [B, S, D] that lm_head needs at `batch.loss_positions`.

    The hidden states of other positions are unspecified.
    """
    positions_R = batch.loss_positions
    saves_time = 0 < len(positions_R) <= _MAX_LOSS_SHARE * batch.num_positions
    return model.hidden_states(
        paddle.to_tensor(batch.input_ids),
        position_ids=paddle.to_tensor(batch.position_ids),
        document_lengths=batch.document_lengths,
        document_parents=batch.document_parents,
        loss_positions=paddle.to_tensor(positions_R) if saves_time else None,
        **({"prompt_lengths": batch.prompt_lengths} if model.reads_prompts else {}),
    )


class SequentialSchedule:
    """Schedule that runs micro-batches in sequence, for a process with all layers."""

    def __init__(self, model: TrainableModel) -> None:
        self.model = model

    def run(
        self, micro_batches: Sequence[ScaledBatch], measure: Measure, after_micro_batch: Callable[[], None]
    ) -> tuple[paddle.Tensor, np.ndarray | float]:
        """Accumulate the gradients of the micro-batches.

        Args:
            micro_batches: micro-batches of this process.
            measure: `measure` of the objective.
            after_micro_batch: function called after the backward pass of each micro-batch.

        Returns:
            Unscaled loss and metrics, summed over the micro-batches.
        """
        total, total_sums = paddle.zeros([], "float32"), 0.0
        for micro_batch in micro_batches:
            with micro_batch.context():
                loss, sums = measure(self.model, hidden_states(self.model, micro_batch.batch), micro_batch.batch)
            (loss * micro_batch.scale).backward()
            after_micro_batch()
            if micro_batch.scale:
                total += loss.detach()
                total_sums = total_sums + sums
        return total, total_sums

    @paddle.no_grad()
    def forward(self, batches: Sequence[Any], function: Callable[..., Any]) -> list[Any]:
        """Return the results of function(model, hidden states, batch) for all batches, without gradients."""
        return [function(self.model, hidden_states(self.model, batch), batch) for batch in batches]


class PipelineSchedule:
    """Schedule that interleaves micro-batches over pipeline stages (parallel/pipeline/runtime.py).

    Args:
        model: model whose decoder runs this stage.
        pipeline: stage of this process.
    """

    def __init__(self, model: TrainableModel, pipeline: Pipeline) -> None:
        self.model, self.pipeline = model, pipeline

    def run(
        self, micro_batches: Sequence[ScaledBatch], measure: Measure, after_micro_batch: Callable[[], None]
    ) -> tuple[paddle.Tensor, np.ndarray | float]:
        """Accumulate the gradients of the micro-batches; see `SequentialSchedule.run` for the arguments.

        `after_micro_batch` is called once after the last backward pass. On stages other than the last, the loss and
        metrics are 0.
        """
        total, total_sums = paddle.zeros([], "float32"), 0.0

        def forward(number: int, is_last_chunk: bool) -> paddle.Tensor | None:
            nonlocal total, total_sums
            micro_batch = micro_batches[number]
            with micro_batch.context():
                hidden_BSD = hidden_states(self.model, micro_batch.batch)
                if not is_last_chunk:
                    return None
                loss, sums = measure(self.model, hidden_BSD, micro_batch.batch)
            if micro_batch.scale:
                total, total_sums = total + loss.detach(), total_sums + sums
            return loss * micro_batch.scale

        self.pipeline.run(self._shapes([micro_batch.batch for micro_batch in micro_batches]), forward, training=True)
        after_micro_batch()
        return total, total_sums

    @paddle.no_grad()
    def forward(self, batches: Sequence[Any], function: Callable[..., Any]) -> list[Any]:
        """Return the results of function(model, hidden states, batch) for all batches; None for each on other stages.

        Only the last stage calls the function. No gradients are computed.
        """
        results: list[Any] = [None] * len(batches)

        def forward(number: int, is_last_chunk: bool) -> None:
            hidden_BSD = hidden_states(self.model, batches[number])
            if is_last_chunk:
                results[number] = function(self.model, hidden_BSD, batches[number])

        self.pipeline.run(self._shapes(batches), forward, training=False)
        return results

    def _shapes(self, batches: Sequence[PackedBatch]) -> list[list[int]]:
        return [self.model.hidden_states_shape(*batch.input_ids.shape) for batch in batches]


ForwardBackward = SequentialSchedule | PipelineSchedule
"""Schedule of the forward and backward passes of one process."""


def build_forward_backward(model: TrainableModel, pipeline: Pipeline | None) -> ForwardBackward:
    """Return a `SequentialSchedule`, or a `PipelineSchedule` if the model is split into pipeline stages."""
    return SequentialSchedule(model) if pipeline is None else PipelineSchedule(model, pipeline)
