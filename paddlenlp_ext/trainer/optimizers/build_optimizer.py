"""Optimizers and gradient clipping: AdamW with decoupled weight decay (arXiv:1711.05101), its variants, and Muon.

Weight decay acts on matrices only. Vectors, which are norm weights and biases, are excluded, as is usual in the field;
PaddleNLP decays them too, so its runs with `weight_decay` above 0 differ. An adapter method can exclude parameters
(`allows_weight_decay`): IA3's scales are neutral at 1, not at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import paddle

from paddlenlp_ext import paddle_compat
from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.adamw import AdamWUpdate, adamw_bf16_op, adamw_op
from paddlenlp_ext.ops.adamw.updates import Bf16Update
from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.gradient_clipping import scale_, sum_of_squares
from paddlenlp_ext.ops.triton_utils.launch import on_gpu_with_triton
from paddlenlp_ext.sharding_spec import Shard, full_shape, is_on_stage, is_updated_here, shard_of
from paddlenlp_ext.trainer.optimizers.adamw_8bit import AdamW8Bit
from paddlenlp_ext.trainer.optimizers.adamw_mini import AdamWMini, num_blocks
from paddlenlp_ext.trainer.optimizers.bf16_rounding import StochasticRounding
from paddlenlp_ext.trainer.optimizers.muon import GatherShards, Muon, is_muon_matrix
from paddlenlp_ext.trainer.optimizers.offload_state import OffloadedOptimizer, require_gpu
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state


class FusedAdamW(paddle.optimizer.AdamW):
    """AdamW that updates all parameters in one call (ops/adamw, ops/adamw), for parameters in groups.

    Results equal those of Paddle's AdamW up to rounding, and the state has the same names: each resumes from the
    other's checkpoint.

    Attributes:
        rounding: draws of stochastic rounding for bfloat16 parameters; None: they have fp32 copies.
    """

    rounding: StochasticRounding | None = None

    @paddle.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient; other parameters keep their state."""
        updates = [update for group in paddle_compat.parameter_groups(self) for update in self._updates(group)]
        constants = paddle_compat.adam_constants(self)
        single = [update for update in updates if update.parameter.dtype == paddle.float32]
        if single:
            adamw_op.choose(single[0].parameter)(single, *constants)
        half = [self._half_update(update) for update in updates if update.parameter.dtype != paddle.float32]
        if half:
            adamw_bf16_op.choose(half[0].update.parameter)(half, *constants)

    def _updates(self, group: dict) -> Iterable[AdamWUpdate]:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        paddle_compat.create_accumulators(self, parameters)
        state, masters = paddle_compat.accumulators(self), paddle_compat.master_weights(self)
        kinds = paddle_compat.adam_state_kinds(self)
        rate, decay = self.get_lr(), group["weight_decay"]
        for parameter in parameters:
            scale = parameter.optimize_attr["learning_rate"]
            key = masters.get(parameter.name, parameter).name
            moment1, moment2, beta1_power, beta2_power = (state[kind][key] for kind in kinds)
            yield AdamWUpdate(
                parameter, parameter.grad, moment1, moment2, beta1_power, beta2_power, rate * scale, decay
            )

    def _half_update(self, update: AdamWUpdate) -> Bf16Update:
        if self.rounding is not None:
            return Bf16Update(update, position=self.rounding.position(update.parameter))
        return Bf16Update(update, master=paddle_compat.master_weights(self)[update.parameter.name])


def trainable_parameters(model: TrainableModel) -> dict[str, paddle.Tensor]:
    """Return the trained parameters by structured name in the model's order; in a pipeline, those of this stage."""
    named = model.named_parameters()
    return {name: parameter for name, parameter in named if not parameter.stop_gradient and is_on_stage(parameter)}


def updated_parameters(model: TrainableModel) -> dict[str, paddle.Tensor]:
    """Return the trained parameters that this process's optimizer updates; on a single process, all of them."""
    return {name: parameter for name, parameter in trainable_parameters(model).items() if is_updated_here(parameter)}


def parameter_groups(model: TrainableModel, weight_decay: float) -> list[dict[str, Any]]:
    """Group the parameters updated here by weight decay and by `model.learning_rate_scale(name)` (LoRA+'s ratio).

    The `learning_rate` of a group is a multiplier of the run's learning rate, as in Paddle's optimizers.
    """
    groups: dict[tuple[bool, float], list[paddle.Tensor]] = {}
    for name, parameter in updated_parameters(model).items():
        key = (_decays(model, name, parameter), float(model.learning_rate_scale(name)))
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0, "learning_rate": scale}
        for (decays, scale), members in groups.items()
    ]


def _decays(model: TrainableModel, name: str, parameter: paddle.Tensor) -> bool:
    return parameter.ndim >= 2 and model.allows_weight_decay(name)


def build_rounding(model: TrainableModel, precision: PrecisionConfig, seed: int) -> StochasticRounding | None:
    """Return the stochastic rounding of the model's trained parameters; None unless `master_weight` is false."""
    parameters = trainable_parameters(model)
    is_half = any(parameter.dtype != paddle.float32 for parameter in parameters.values())
    return StochasticRounding(seed, parameters) if is_half and not precision.master_weight else None


def build_optimizer(
    model: TrainableModel,
    options: OptimConfig,
    rounding: StochasticRounding | None = None,
    gather: GatherShards | None = None,
) -> Any:
    """Build the optimizer that `optim` names, over the model's trained parameters.

    Parameters in half precision get fp32 copies ("master weights"), or with `rounding` are rounded stochastically. The
    learning rate is set before every step (lr_scheduler.py), and gradients are clipped by `clip_gradients`.

    Args:
        model: the model.
        options: `config.optim`.
        rounding: stochastic rounding of parameters in half precision; None: fp32 copies.
        gather: function that gathers the shards of a tensor; None if no parameter is sharded.

    Raises:
        ValueError: no parameter trains.
    """
    assert options.optim in _BUILDERS, "checked by config.validation"
    if all(parameter.stop_gradient for parameter in model.parameters()):
        raise ValueError(
            "no parameter of the model trains, as all are frozen; choose an adapter, or unfreeze parameters"
        )
    groups = parameter_groups(model, options.weight_decay)
    return _BUILDERS[options.optim](_Request(model, groups, options, rounding, gather or _no_shards))


@dataclass(frozen=True)
class _Request:
    """Arguments of an optimizer's builder: those of `build_optimizer`, and the groups of `parameter_groups`."""

    model: TrainableModel
    groups: list[dict[str, Any]]
    options: OptimConfig
    rounding: StochasticRounding | None
    gather: GatherShards


def _no_shards(part: paddle.Tensor, shard: Shard) -> paddle.Tensor:
    raise AssertionError(f"{part.name} is sharded, and no function gathers it")


def offload_state(model: TrainableModel, optimizer: Any) -> OffloadedOptimizer:
    """Wrap an optimizer so that its state is in pinned host memory between steps.

    Raises:
        ValueError: the model is not on a GPU.
    """
    parameters = updated_parameters(model)
    require_gpu(parameters.values())
    return OffloadedOptimizer(optimizer, lambda: optimizer_state(optimizer, parameters).values())


def _adamw(request: _Request) -> paddle.optimizer.AdamW:
    options, rounding = request.options, request.rounding
    groups: Any = request.groups
    if not groups:  # all trained parameters are on other stages, and Paddle's optimizer needs at least one
        groups = [{"params": [paddle.create_parameter([1], "float32")], "weight_decay": 0.0}]
    parameters = [parameter for group in groups for parameter in group["params"]]
    is_fused = rounding is not None or any(_is_bf16_on_cpu(parameter) for parameter in parameters)
    for condition in (usable, on_gpu_with_triton):
        is_fused = is_fused or all(condition(parameter) is None for parameter in parameters)
    optimizer = (FusedAdamW if is_fused else paddle.optimizer.AdamW)(
        learning_rate=options.learning_rate,
        parameters=groups,
        beta1=options.adam_beta1,
        beta2=options.adam_beta2,
        epsilon=options.adam_epsilon,
        weight_decay=options.weight_decay,
        multi_precision=rounding is None,
    )
    if isinstance(optimizer, FusedAdamW):
        optimizer.rounding = rounding
    return optimizer


def _is_bf16_on_cpu(parameter: paddle.Tensor) -> bool:
    """Return whether Paddle's AdamW has no kernel for a parameter."""
    return parameter.dtype == paddle.bfloat16 and parameter.place.is_cpu_place()


def _adamw_mini(request: _Request) -> AdamWMini:
    blocks = {
        parameter.name: num_blocks(name, parameter.shape, request.model.config.head_dim)
        for name, parameter in trainable_parameters(request.model).items()
    }
    return AdamWMini(request.groups, request.options, request.rounding, blocks)


def _adamw_8bit(request: _Request) -> AdamW8Bit:
    return AdamW8Bit(request.groups, request.options, request.rounding)


def _muon(request: _Request) -> Muon:
    matrices = {
        parameter.name: shard_of(parameter)
        for name, parameter in trainable_parameters(request.model).items()
        if is_muon_matrix(name, full_shape(parameter))
    }
    return Muon(request.groups, request.options, request.rounding, matrices, request.gather)


_BUILDERS: dict[str, Callable[[_Request], Any]] = {
    "adamw": _adamw,
    "adamw_mini": _adamw_mini,
    "adamw_8bit": _adamw_8bit,
    "muon": _muon,
}


def global_norm(gradients: Iterable[paddle.Tensor]) -> float:
    """Return the Euclidean norm of all gradients as one vector; 0 without gradients."""
    return math.sqrt(sum_of_squares(gradients))


@paddle.no_grad()
def clip_gradients(gradients: list[paddle.Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients of norm `norm` down to `max_norm` in place; a `max_norm` of 0 or less disables clipping."""
    if max_norm > 0.0 and norm > max_norm:
        scale_(gradients, max_norm / norm)
