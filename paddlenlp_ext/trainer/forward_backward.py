"""The loss of a micro-batch: a sum over its learned tokens, which the trainer divides by the whole window's number.

Shapes: B batch, S sequence, T tokens (B * S), D hidden, V vocabulary.

How the micro-batches of a window go through the model and back: one after the other, or through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import paddle

from paddlenlp_ext.data.collate import PackedBatch
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from paddlenlp_ext.parallel.pipeline.runtime import Pipeline


def loss_sum(model: Any, batch: PackedBatch) -> tuple[paddle.Tensor, Any]:
    """Cross entropy summed over the learned tokens of the batch, and how many of them argmax gets right."""
    return loss_of_hidden(model, hidden_states(model, batch), batch)


def hidden_states(model: Any, batch: PackedBatch) -> paddle.Tensor:
    """What the head reads, [B, S, D]."""
    return model.hidden_states(
        paddle.to_tensor(batch.input_ids),
        position_ids=paddle.to_tensor(batch.position_ids),
        document_lengths=batch.document_lengths,
        **({"prompt_lengths": batch.prompt_lengths} if model.reads_prompts else {}),
    )


def loss_of_hidden(model: Any, hidden_BSD: paddle.Tensor, batch: PackedBatch) -> tuple[paddle.Tensor, Any]:
    """The rest of `loss_sum`. The logits never stand as a whole (ops/linear_cross_entropy/__init__.py)."""
    hidden_TD = hidden_BSD.reshape([-1, hidden_BSD.shape[-1]])
    labels_T = paddle.to_tensor(batch.labels).reshape([-1])
    cross_entropy = linear_cross_entropy if model.vocab_parallel is None else model.vocab_parallel.cross_entropy
    return cross_entropy(hidden_TD, model.head_weight(), labels_T)


MicroBatchContext = Callable[[int], AbstractContextManager[Any]]
"""What a micro-batch's forward pass, given by its number, runs in: random numbers, formats, noise."""


class ForwardBackward(Protocol):
    """Runs micro-batches."""

    def run(
        self,
        batches: Sequence[PackedBatch],
        scales: Sequence[float],
        around: MicroBatchContext,
        after: Callable[[], None],
    ) -> paddle.Tensor:
        """Add `scales[n]` times the gradients of each micro-batch's loss sum; returns the sum of those sums.

        Micro-batches with a scale of 0 do not count. `after` is called when nothing of a micro-batch is left to run.
        The sum is this process's share of it: the losses that its own part of the model made.
        """

    def evaluate(self, batch: PackedBatch) -> tuple[float, int]:
        """A batch's loss sum and hits, this process's share of it; nothing learns."""


class SequentialSchedule:
    """Every process has all layers.

    Args:
        model: a `CausalLM` or `PeftModel`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(
        self,
        batches: Sequence[PackedBatch],
        scales: Sequence[float],
        around: MicroBatchContext,
        after: Callable[[], None],
    ) -> paddle.Tensor:
        """One after the other."""
        total = paddle.zeros([], "float32")
        for number, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
            with around(number):
                loss, _ = loss_sum(self.model, batch)
            (loss * scale).backward()
            after()
            if scale:
                total += loss.detach()
        return total

    def evaluate(self, batch: PackedBatch) -> tuple[float, int]:
        """Forwards."""
        loss, hits = loss_sum(self.model, batch)
        return float(loss), int(hits)


class PipelineSchedule:
    """Every process has some of the layers (parallel/pipeline/runtime.py).

    Args:
        model: a `CausalLM` or `PeftModel` with the pipeline installed.
        pipeline: this process's part of it.
    """

    def __init__(self, model: Any, pipeline: Pipeline) -> None:
        self.model, self.pipeline = model, pipeline

    def run(
        self,
        batches: Sequence[PackedBatch],
        scales: Sequence[float],
        around: MicroBatchContext,
        after: Callable[[], None],
    ) -> paddle.Tensor:
        """Interleaved; `after` comes once for all."""
        total = paddle.zeros([], "float32")

        def forward(number: int, ends: bool) -> paddle.Tensor | None:
            nonlocal total
            with around(number):
                hidden_BSD = hidden_states(self.model, batches[number])
                if not ends:
                    return None
                loss, _ = loss_of_hidden(self.model, hidden_BSD, batches[number])
            total = total + loss.detach()
            return loss * scales[number]

        self.pipeline.run(self._shapes(batches), forward, learns=True)
        after()
        return total

    def evaluate(self, batch: PackedBatch) -> tuple[float, int]:
        """Forwards through all stages; those before the last go on with the next batch meanwhile."""
        measured = (0.0, 0)

        def forward(number: int, ends: bool) -> None:
            nonlocal measured
            hidden_BSD = hidden_states(self.model, batch)
            if ends:
                loss, hits = loss_of_hidden(self.model, hidden_BSD, batch)
                measured = (float(loss), int(hits))

        self.pipeline.run(self._shapes([batch]), forward, learns=False)
        return measured

    def _shapes(self, batches: Sequence[PackedBatch]) -> list[list[int]]:
        return [self.model.hidden_states_shape(*batch.input_ids.shape) for batch in batches]


def build_forward_backward(model: Any, pipeline: Pipeline | None) -> ForwardBackward:
    """The way in which a model runs."""
    return SequentialSchedule(model) if pipeline is None else PipelineSchedule(model, pipeline)
