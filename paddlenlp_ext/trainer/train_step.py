"""One optimizer step: a whole window forwards and backwards, then the update.

The loss is the sum over the learned tokens of the window, all micro-batches and ranks, divided by their number: the
same update however the window is split.

The number format of the forward pass.

Randomness as a function of position: nothing random is saved, and a resumed run draws what the straight one drew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import paddle

from paddlenlp_ext.data.collate import Collate, PackedBatch
from paddlenlp_ext.data.sampler import StepBatch
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpu.bf16 import bf16_matmuls
from paddlenlp_ext.trainer.forward_backward import ForwardBackward, SequentialSchedule
from paddlenlp_ext.trainer.neftune import EmbeddingNoise
from paddlenlp_ext.trainer.optimizer import clip_gradients, trainable_parameters
from paddlenlp_ext.trainer.process_group import ProcessGroup
from paddlenlp_ext.trainer.state import StepReport
from paddlenlp_ext.utils.random import seed_of


def autocast(precision: Any) -> AbstractContextManager[Any]:
    """Context for a forward pass: under O1 matrix products are cast to bf16; with O2 the weights themselves are bf16.

    On the CPU products round their inputs to bf16 under both; sums and everything else are fp32 there
    (ops/cpu/bf16.py).

    Args:
        precision: `config.precision`.

    Raises:
        ValueError: fp16, whose gradients would need loss scaling.
    """
    dtype = precision.compute_dtype
    if dtype == "float16":
        raise ValueError("fp16: true is not available: its gradients need loss scaling; use bf16: true")
    if dtype == "bfloat16" and precision.device == "cpu":
        return bf16_matmuls()
    if dtype == "float32" or precision.fp16_opt_level != "O1":
        return nullcontext()
    return paddle.amp.auto_cast(level="O1", dtype=dtype)


def micro_step_seed(seed: int, step: int, micro_batch: int) -> int:
    """A 32-bit seed, well mixed from where the micro-batch stands in the run."""
    return seed_of(seed, step, micro_batch)


def seed_micro_step(model: TrainableModel, seed: int, step: int, micro_batch: int) -> None:
    """Start Paddle's generators anew, now and in each of the model's layers.

    So dropout and noise depend on the position alone, and not on which layers this process runs.
    `micro_batch` counts within the step's window, over all ranks: the numbers are those of one process that goes
    through the window alone.
    """
    dropout_seed = micro_step_seed(seed, step, micro_batch)
    paddle.seed(dropout_seed)
    model.set_dropout_seed(dropout_seed)


_ROWS_NAMED = 8


class NonFiniteError(ValueError):
    """A loss or gradient norm is NaN or infinite; neither parameters nor optimizer have been touched."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What an optimizer step needs to know besides its window.

    Attributes:
        seed: of the run.
        max_grad_norm: 0: no clipping.
        total_steps: of the run; adapters plan by it.
        noise: NEFTune's, or None.
        autocast: makes the context of a forward pass (precision.py).
    """

    seed: int
    max_grad_norm: float
    total_steps: int
    noise: EmbeddingNoise | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


class OptimizerStep:
    """Runs windows through a model in training mode; this rank takes its share of each (`StepBatch.share`)."""

    def __init__(
        self,
        model: TrainableModel,
        optimizer: paddle.optimizer.Optimizer,
        collate_rows: Collate,
        ranks: ProcessGroup,
        options: StepOptions,
        passes: ForwardBackward | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.collate_rows, self.ranks, self.options = collate_rows, ranks, options
        self.passes = passes or SequentialSchedule(model)
        self.parameters = list(trainable_parameters(model).values())
        model.plan_steps(options.total_steps)

    def run(self, window: StepBatch, step: int, learning_rate: float) -> StepReport:
        """Make the optimizer step that follows `step` steps.

        Raises:
            NonFiniteError: the loss or the gradients' norm isn't finite; nothing was updated.
            ValueError: not one token of the window is learned.
        """
        started = time.perf_counter()
        batches = self._fetch(window)
        num_target_tokens, num_tokens, num_rows = self._count(list(batches.values()))
        if num_target_tokens == 0:
            raise ValueError(f"no token is learned in optimizer step {step + 1}: every label of it is masked")
        share = self._run_batches(batches, window, step, num_target_tokens)
        self.ranks.reduce_partial_grads(self.parameters)
        total, auxiliary = self.ranks.sum_stages([share, self._auxiliary()])
        self.ranks.sum_gradients(self.parameters)
        loss = self.ranks.sum_numbers([total])[0] / num_target_tokens + auxiliary
        grad_norm = self._update(loss, step, learning_rate)
        seconds = time.perf_counter() - started
        return StepReport(loss, grad_norm, learning_rate, num_tokens, num_target_tokens, num_rows, seconds)

    def prepare_adapter(self, windows: Iterator[StepBatch]) -> None:
        """Let an adapter method look at gradients of the first batches before a fresh run; none of them stays.

        Every rank looks at the same batches, so that all come to the same adapter, and to that of a single process.
        """
        batches = enumerate(self.collate_rows(packs) for window in windows for packs in window.micro_batches)

        def run_batch() -> None:
            number, batch = next(batches)
            scale = 1.0 / max(1, batch.num_target_tokens)
            self.passes.run([batch], [scale], lambda _: self._around(batch, 0, number), lambda: None)

        with self.ranks.gathered_parameters():
            self.model.before_training(run_batch)
        for parameter in self.model.parameters():
            parameter.clear_gradient(False)  # by position: Paddle ignores the keyword and fills with zeros

    def _run_batches(self, own: dict[int, PackedBatch], window: StepBatch, step: int, num_target_tokens: int) -> float:
        """Add this rank's micro-batches to the gradients; returns this process's share of their loss sum."""
        places, batches, scales = list(own), list(own.values()), [1.0 / num_target_tokens] * len(own)
        missing = math.ceil(len(window.micro_batches) / self.ranks.size) - len(batches)
        if self.ranks.forward_is_collective and missing:  # to keep the others company
            places, batches = [*places, 0], [*batches, self.collate_rows(window.micro_batches[0])]
            scales, missing = [*scales, 0.0], 0

        def around(number: int) -> AbstractContextManager[None]:
            return self._around(batches[number], step, places[number])

        total = self.passes.run(batches, scales, around, self.ranks.after_micro_batch)
        for _ in range(missing):
            self.ranks.after_micro_batch()
        return float(total)

    @contextmanager
    def _around(self, batch: PackedBatch, step: int, micro_batch: int) -> Iterator[None]:
        """What a forward pass runs in: its random numbers, formats and noise."""
        noise = self.options.noise
        seed_micro_step(self.model, self.options.seed, step, micro_batch)
        with self.options.autocast(), nullcontext() if noise is None else noise.documents(batch.document_lengths):
            yield

    def _fetch(self, window: StepBatch) -> dict[int, PackedBatch]:
        """This rank's micro-batches by their place in the window; all of them before the first is run, because their
        learned tokens count.
        """
        share = window.local_micro_batches(self.ranks.index, self.ranks.size)
        return {place: self.collate_rows(packs) for place, packs in share.items()}

    def _count(self, batches: list[PackedBatch]) -> tuple[int, int, int]:
        """Learned tokens, tokens and rows of the whole window."""
        counts = [(batch.num_target_tokens, batch.num_tokens, len(batch.row_indices)) for batch in batches]
        own = [float(sum(column)) for column in zip(*counts, strict=True)] or [0.0, 0.0, 0.0]
        learned, tokens, rows = self.ranks.sum_numbers(own)
        return int(learned), int(tokens), int(rows)

    def _auxiliary(self) -> float:
        """Add the adapter's own loss, once a step and shared among the ranks; returns its value, this stage's share."""
        loss = self.model.auxiliary_loss()
        if loss is None:
            return 0.0
        (loss * (1.0 / self.ranks.size)).backward()
        return float(loss)

    def _update(self, loss: float, step: int, learning_rate: float) -> float:
        """Clip and update; returns the gradients' norm before clipping."""
        # Gradients are dropped, not zeroed: a zero left behind would move a parameter that a resumed run leaves alone.
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        grad_norm = self.ranks.norm(self.parameters)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._clear_gradients()
            raise NonFiniteError(f"loss {loss}, gradient norm {grad_norm}")
        clip_gradients(gradients, grad_norm, self.options.max_grad_norm)
        self.optimizer.set_lr(learning_rate)
        self.optimizer.step()
        self.ranks.broadcast_updated()
        self.model.after_step(step + 1, self.options.total_steps, learning_rate)
        self._clear_gradients()
        return grad_norm

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.clear_gradient(False)  # by position: Paddle ignores the name


def broken_step(error: NonFiniteError, window: StepBatch, rows: Any, step: int, learning_rate: float) -> NonFiniteError:
    """The same error with what a user can act on: which rows the step read, and from where.

    Args:
        error: what `OptimizerStep.run` raised.
        window: the step's.
        rows: the TokenizedDataset; `rows.source(i)` gives (file, line).
        step: steps made before it.
        learning_rate: of the step.
    """
    places = ["row {} ({}:{})".format(row, *rows.source(row)) for row in window.row_indices[:_ROWS_NAMED]]
    more = len(window.row_indices) - len(places)
    named = ", ".join(places) + (f" and {more} more" if more else "")
    return NonFiniteError(
        f"step {step + 1}: {error}. The step was not made and nothing was saved from it. Its rows: {named}. Look at "
        f"them, or lower learning_rate ({learning_rate:.3g} here)"
    )
