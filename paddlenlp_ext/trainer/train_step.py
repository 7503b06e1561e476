"""One optimizer step: forward and backward passes of a global batch, gradient reduction, clipping, update.

The global batch consists of the micro-batches of all ranks. The loss of a step is a mean over the units (such as target
tokens) of the global batch. The loss sum of each micro-batch is divided by the global number of units before its
backward pass. Gradients are then summed, never averaged. The mean cross entropy of a step therefore does not depend on
the split into micro-batches. In float16, the loss is also multiplied by a loss scale, and the summed gradients are
divided by the loss scale before clipping (loss_scale.py).

Random numbers are a function of the position in the run. A resumed run draws the same random numbers as an
uninterrupted run, and checkpoints need no generator state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.data.collate import Collate, PackedBatch
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.models.decoder_layers import all_positions_computed
from paddlenlp_ext.nn.load_balancing_loss import imbalance
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from paddlenlp_ext.ops.gradient_clipping import clip_gradients, scale_
from paddlenlp_ext.quantization.int8_training import inaccurate_layers, measured_errors
from paddlenlp_ext.trainer.forward_backward import ForwardBackward, ScaledBatch, SequentialSchedule
from paddlenlp_ext.trainer.neftune import EmbeddingNoise
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy
from paddlenlp_ext.trainer.optimizers.bf16_rounding import StochasticRounding
from paddlenlp_ext.trainer.optimizers.optimizer_state import Optimizer
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.trainer.stability.master_gradients import widen_gradients
from paddlenlp_ext.trainer.trainer_state import StepReport
from paddlenlp_ext.utils.seeds import seed_of

EXPERT_IMBALANCE = "expert_imbalance"
"""Metric of a step: maximum expert load divided by mean expert load, averaged over the layers."""
_BAD_GRADIENTS, _BAD_LOSS = 1.0, 2.0
"""Codes for non-finite gradients and a non-finite loss; all processes use the maximum of their codes."""


class NonFiniteError(ValueError):
    """Error for a non-finite loss or gradient norm of a step; parameters and optimizer state are unchanged.

    Args:
        loss: loss on this process.
        grad_norm: gradient norm on this process.
        message: error message; None: a message with loss and gradient norm.
        is_overflow: whether the loss is finite on all processes, in which case a lower loss scale may help.
    """

    def __init__(self, loss: float, grad_norm: float, message: str | None = None, is_overflow: bool = False) -> None:
        super().__init__(message or f"loss {loss}, gradient norm {grad_norm}")
        self.loss, self.grad_norm, self.is_overflow = loss, grad_norm, is_overflow


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of an optimizer step.

    Attributes:
        seed: seed of the run.
        max_grad_norm: maximum global gradient norm; 0 disables clipping.
        total_steps: optimizer steps of the run, for adapter methods with a schedule.
        noise: NEFTune noise on the embeddings, or None.
        rounding: stochastic rounding of the optimizer's updates, or None.
        float32_gradients: whether half-precision parameters have float32 gradients.
        autocast: function that returns the mixed-precision context of a forward pass.
    """

    seed: int
    max_grad_norm: float
    total_steps: int
    noise: EmbeddingNoise | None = None
    rounding: StochasticRounding | None = None
    float32_gradients: bool = False
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def from_config(
        cls, config: RunConfig, model: TrainableModel, total_steps: int, rounding: StochasticRounding | None
    ) -> StepOptions:
        """Return the options of a run. With NEFTune, the noise is added to the embedding of `model`."""
        return cls(
            seed=config.train.seed,
            max_grad_norm=config.optim.max_grad_norm,
            total_steps=total_steps,
            noise=EmbeddingNoise(model, config.train.neftune_noise_alpha) if config.train.neftune else None,
            rounding=rounding,
            float32_gradients=config.precision.float32_gradients,
            autocast=partial(autocast, config.precision),
        )


class OptimizerStep:
    """Optimizer steps of a model in training mode. Each rank runs its local micro-batches of the global batch."""

    def __init__(
        self,
        model: TrainableModel,
        optimizer: Optimizer,
        collate_rows: Collate,
        process_group: ProcessGroup,
        options: StepOptions,
        forward_backward: ForwardBackward | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.collate_rows, self.process_group, self.options = collate_rows, process_group, options
        self.forward_backward = forward_backward or SequentialSchedule(model)
        self.objective = objective or CrossEntropy()
        self.parameters = list(trainable_parameters(model).values())
        self._end_float32_gradients = widen_gradients(self.parameters if options.float32_gradients else [])
        model.hooks.plan_steps(options.total_steps)

    def run(self, step_batch: StepBatch, step: int, learning_rate: float, loss_scale: float = 1.0) -> StepReport:
        """Run one optimizer step.

        Args:
            step_batch: the global batch.
            step: number of earlier optimizer steps.
            learning_rate: learning rate of the step.
            loss_scale: factor of the loss in the backward pass (float16).

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite; parameters and optimizer state are unchanged.
            ValueError: all labels of the global batch are masked.
        """
        self.objective.before_step(step_batch, self.collate_rows)
        started = time.perf_counter()
        # The backward passes need the global number of units, so all local micro-batches are collated first.
        micro_batches = self._collate_local(step_batch)
        num_units, num_target_tokens, num_tokens, num_rows = self._count_global(micro_batches.values())
        if num_units == 0:
            raise ValueError(
                f"optimizer step {step + 1} has no {self.objective.unit}: every label of its batch is masked; check "
                "that the training rows have answers"
            )

        local_loss, local_sums = self._run_micro_batches(micro_batches, step_batch, step, loss_scale / num_units)
        local_sums += self._expert_counts()
        # Within a replica: sum the partial gradients of unsharded parameters over the tensor-parallel ranks, and the
        # gradients of parameters that several pipeline stages hold (such as tied embeddings) over these stages.
        self.process_group.reduce_partial_grads(self.parameters)
        # The last pipeline stage has the loss. Each stage has the auxiliary loss of its layers. Sum over the stages.
        replica_loss, auxiliary, *sums = self.process_group.sum_stages(
            [local_loss, self._backward_auxiliary(loss_scale), *local_sums]
        )
        # Over the replicas (data-parallel and sharding ranks): sum all gradients and the loss.
        self.process_group.sum_gradients(self.parameters)
        total, *sums = self.process_group.sum_numbers([replica_loss, *sums])
        loss = total / num_units + auxiliary

        self._unscale(loss_scale)
        grad_norm = self._clip(loss)
        self._update(step, learning_rate)
        self.model.hooks.after_step(step + 1, self.options.total_steps, learning_rate)
        self.objective.after_step(step + 1)
        self._clear_gradients()
        seconds = time.perf_counter() - started
        metrics = self._metrics(np.array(sums))
        return StepReport(loss, grad_norm, learning_rate, num_tokens, num_target_tokens, num_rows, seconds, metrics)

    def remove_hooks(self) -> None:
        """Remove the hooks of NEFTune noise and of float32 gradients from the model."""
        if self.options.noise is not None:
            self.options.noise.remove()
        self._end_float32_gradients()

    def prepare_adapter(self, step_batches: Iterable[StepBatch]) -> None:
        """Initialize adapters that need gradients of the first batches, then drop the gradients.

        Every rank runs the same batches. All ranks therefore start with the adapter of a single-process run.
        """
        self._run_before_training(step_batches, self.model.hooks.before_training)

    def choose_int8_layers(self, step_batches: Iterable[StepBatch]) -> list[str]:
        """Return the layers whose 8-bit matmuls are inaccurate on the first micro-batch (int8_training.py).

        Every rank measures the same micro-batch.
        """
        with measured_errors(self.model) as errors:
            self._run_before_training(step_batches, lambda run_batch: run_batch())
        return inaccurate_layers(errors)

    def _run_before_training(
        self, step_batches: Iterable[StepBatch], run: Callable[[Callable[[], None]], None]
    ) -> None:
        """Call `run` with a function that runs the forward and backward pass of the next batch; drop the gradients.

        All layers compute all positions, because adapter methods read the inputs of layers.
        """
        batches = enumerate(
            self.collate_rows(packs, each.epoch) for each in step_batches for packs in each.micro_batches
        )

        def run_batch() -> None:
            number, batch = next(batches)
            scale = 1.0 / max(1, self.objective.num_units(batch))
            self._accumulate([self._scaled(batch, scale, 0, number)], lambda: None)

        with self.process_group.gathered_parameters(), all_positions_computed(self.model):
            run(run_batch)
        self._expert_counts()  # drop the expert counts of these batches
        _drop_gradients(self.model.parameters())

    # -- forward and backward -----------------------------------------------------------------------------------------
    def _collate_local(self, step_batch: StepBatch) -> dict[int, PackedBatch]:
        """Return this rank's micro-batches by their index in the global batch."""
        local = step_batch.local_micro_batches(self.process_group.index, self.process_group.size)
        return {index: self.collate_rows(packs, step_batch.epoch) for index, packs in local.items()}

    def _count_global(self, batches: Collection[PackedBatch]) -> tuple[int, int, int, int]:
        """Return units, target tokens, tokens and rows of the global batch, summed over the replicas."""
        local = [
            sum(self.objective.num_units(batch) for batch in batches),
            sum(batch.num_target_tokens for batch in batches),
            sum(batch.num_tokens for batch in batches),
            sum(len(batch.row_indices) for batch in batches),
        ]
        units, targets, tokens, rows = self.process_group.sum_numbers([float(count) for count in local])
        return int(units), int(targets), int(tokens), int(rows)

    def _run_micro_batches(
        self, micro_batches: dict[int, PackedBatch], step_batch: StepBatch, step: int, scale: float
    ) -> tuple[float, list[float]]:
        """Run forward and backward passes of the local micro-batches, with losses multiplied by `scale`.

        Return the unscaled sums of loss and metrics on this process.

        Forward and backward passes gather parameters with ZeRO-3, and exchange tokens with expert parallelism. All
        ranks must therefore run the same number of passes. A rank with fewer micro-batches runs a dummy micro-batch
        with scale 0, which adds zero gradients.
        """
        scaled = [self._scaled(batch, scale, step, index) for index, batch in micro_batches.items()]
        num_missing = math.ceil(len(step_batch.micro_batches) / self.process_group.size) - len(scaled)
        if self.process_group.forward_is_collective and num_missing:
            dummy = self.collate_rows(step_batch.micro_batches[0], step_batch.epoch)
            scaled.append(self._scaled(dummy, 0.0, step, 0))
            num_missing = 0
        result = self._accumulate(scaled, self.process_group.after_micro_batch)
        for _ in range(num_missing):  # the gradient reduction is collective even if the forward pass is not
            self.process_group.after_micro_batch()
        return result

    def _accumulate(
        self, scaled: list[ScaledBatch], after_micro_batch: Callable[[], None]
    ) -> tuple[float, list[float]]:
        """Run forward and backward passes; return the sums of loss and metrics on this process."""
        batches = self.objective.prepare([micro_batch.batch for micro_batch in scaled])
        scaled = [replace(one, batch=batch) for one, batch in zip(scaled, batches, strict=True)]
        loss, sums = self.forward_backward.run(scaled, self._measure, after_micro_batch)
        return float(loss), (np.zeros(self.objective.num_sums) + sums).tolist()

    def _measure(
        self, model: TrainableModel, hidden_BSD: paddle.Tensor, batch: PackedBatch
    ) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the loss and metric sums of the objective; the loss includes the load balancing loss of the routers.

        The load balancing loss of a step is a mean over micro-batches, weighted by their number of units
        (target tokens, for example).
        """
        loss, sums = self.objective.measure(model, hidden_BSD, batch)
        balance = model.load_balance
        if balance is not None and balance.loss is not None:
            loss = loss + balance.loss * float(self.objective.num_units(batch))
        return loss, sums

    def _expert_counts(self) -> list[float]:
        """Return the number of tokens per layer and expert since the last call; empty without experts."""
        balance = self.model.load_balance
        return [] if balance is None else balance.pop_counts().ravel().tolist()

    def _metrics(self, sums: np.ndarray) -> dict[str, float]:
        """Return the metrics of objective and experts; `sums` are the metric sums of the global batch."""
        metrics, balance = self.objective.step_metrics(sums[: self.objective.num_sums]), self.model.load_balance
        if balance is None:
            return metrics
        counts_LE = sums[self.objective.num_sums :].reshape([-1, balance.num_experts])
        return {**metrics, EXPERT_IMBALANCE: imbalance(counts_LE)}

    def _scaled(self, batch: PackedBatch, scale: float, step: int, micro_batch: int) -> ScaledBatch:
        """Return a micro-batch with the scale of its loss and the context of its forward pass."""
        return ScaledBatch(batch, scale, partial(self._micro_batch_context, batch, step, micro_batch, scale > 0.0))

    @contextmanager
    def _micro_batch_context(self, batch: PackedBatch, step: int, micro_batch: int, is_counted: bool) -> Iterator[None]:
        """Set random seed, compute dtype and noise of a micro-batch for the forward pass inside the block."""
        seed_micro_batch(self.model, self.options.seed, step, micro_batch)
        balance = self.model.load_balance
        ignoring = nullcontext() if balance is None else balance.without_padding(batch.token_mask, is_counted)
        with self.options.autocast(), self._noise_of(batch), ignoring:
            yield

    def _noise_of(self, batch: PackedBatch) -> AbstractContextManager[None]:
        noise = self.options.noise
        return nullcontext() if noise is None else noise.documents(batch.document_lengths, batch.document_parents)

    def _backward_auxiliary(self, loss_scale: float) -> float:
        """Add the gradients of the adapter's auxiliary loss; return the auxiliary loss of this stage.

        The gradients are divided by the number of replicas, because they are summed over the replicas afterwards.
        """
        loss = self.model.hooks.auxiliary_loss()
        if loss is None:
            return 0.0
        (loss * (loss_scale / self.process_group.size)).backward()
        return float(loss)

    # -- update -------------------------------------------------------------------------------------------------------
    def _unscale(self, loss_scale: float) -> None:
        """Divide the reduced gradients by the loss scale."""
        if loss_scale != 1.0:
            scale_([parameter.grad for parameter in self.parameters if parameter.grad is not None], 1.0 / loss_scale)

    def _clip(self, loss: float) -> float:
        """Clip the reduced gradients; return their global norm before clipping.

        Raises:
            NonFiniteError: the loss or norm is not finite on at least one process; all processes drop the gradients.
        """
        grad_norm = self.process_group.norm(self.parameters)
        found = _BAD_LOSS if not math.isfinite(loss) else _BAD_GRADIENTS if not math.isfinite(grad_norm) else 0.0
        # Tensor-parallel ranks compute the norm independently, and may disagree on whether the norm is finite.
        worst = self.process_group.max_over_processes(found)
        if worst:
            self._clear_gradients()
            raise NonFiniteError(loss, grad_norm, is_overflow=worst == _BAD_GRADIENTS)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        clip_gradients(gradients, grad_norm, self.options.max_grad_norm)
        return grad_norm

    def _update(self, step: int, learning_rate: float) -> None:
        """Update the parameters that this rank owns and broadcast them to the sharding ranks."""
        if self.options.rounding is not None:
            self.options.rounding.step = step
        self.optimizer.set_lr(learning_rate)
        self.optimizer.step()
        self.process_group.broadcast_updated()

    def _clear_gradients(self) -> None:
        _drop_gradients(self.parameters)


def _drop_gradients(parameters: Iterable[paddle.Tensor]) -> None:
    """Drop gradients instead of zeroing them, because AdamW would update a parameter whose gradient is zero."""
    for parameter in parameters:
        parameter.clear_gradient(False)  # positional, because Paddle ignores the keyword argument


def autocast(precision: PrecisionConfig) -> AbstractContextManager[Any]:
    """Return the mixed-precision context of a forward pass.

    | device | level | matmuls | weights |
    |---|---|---|---|
    | GPU | O1 | cast to bf16 or fp16 | float32 |
    | GPU | O2 | bf16 or fp16 | bf16 or fp16 |
    | CPU | O1 | inputs rounded to bf16, sums in float32 (ops/cpp/bf16.py) | float32; bf16 if frozen |
    | CPU | O2 | inputs rounded to bf16, sums in float32 (ops/cpp/bf16.py) | bf16 |
    """
    dtype: Any = precision.compute_dtype
    if dtype == "bfloat16" and capabilities(precision.device).cpp:
        return bf16_matmuls()
    if dtype == "float32" or precision.fp16_opt_level != "O1":
        return nullcontext()
    return paddle.amp.auto_cast(level="O1", dtype=dtype)


def seed_micro_batch(model: TrainableModel, seed: int, step: int, micro_batch: int) -> None:
    """Seed Paddle's generators from seed, step and micro-batch, both now and at the start of each layer.

    Dropout and noise therefore do not depend on which layers this process runs. `micro_batch` is an index in the global
    batch, so a distributed run draws the same random numbers as a single-process run.
    """
    dropout_seed = seed_of(seed, step, micro_batch)
    paddle.seed(dropout_seed)
    model.set_dropout_seed(dropout_seed)
