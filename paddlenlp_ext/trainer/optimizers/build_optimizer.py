"""Build the optimizer selected by `optim`: AdamW, AdamW with 8-bit moments, Adam-mini or Muon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.triton_utils.launch import on_gpu_with_triton
from paddlenlp_ext.sharding_spec import Shard, full_shape, shard_of
from paddlenlp_ext.trainer.optimizers.adamw_8bit import AdamW8Bit
from paddlenlp_ext.trainer.optimizers.adamw_mini import AdamWMini, head_dim_of, num_blocks
from paddlenlp_ext.trainer.optimizers.bf16_rounding import StochasticRounding
from paddlenlp_ext.trainer.optimizers.fused_adamw import FusedAdamW
from paddlenlp_ext.trainer.optimizers.muon import GatherShards, Muon, is_muon_matrix
from paddlenlp_ext.trainer.optimizers.offload_state import OffloadedOptimizer, require_gpu
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import parameter_groups, trainable_parameters, updated_parameters


def build_rounding(model: TrainableModel, precision: PrecisionConfig, seed: int) -> StochasticRounding | None:
    """Return a `StochasticRounding` for half-precision parameters if `master_weight` is false; otherwise None."""
    parameters = trainable_parameters(model)
    is_half = any(parameter.dtype != paddle.float32 for parameter in parameters.values())
    return StochasticRounding(seed, parameters) if is_half and not precision.master_weight else None


def build_optimizer(
    model: TrainableModel,
    options: OptimConfig,
    rounding: StochasticRounding | None = None,
    gather: GatherShards | None = None,
) -> Any:
    """Build the optimizer selected by `optim`, for the trained parameters of the model.

    Half-precision parameters have fp32 copies ("master weights"), or are rounded stochastically by `rounding`.
    `OptimizerStep` sets the learning rate before each step, and clips the gradients.

    Args:
        model: the model.
        options: `config.optim`.
        rounding: stochastic rounding of half-precision parameters; None: fp32 copies.
        gather: function that gathers the shards of a tensor; None if all parameters are unsharded.

    Raises:
        ValueError: all parameters are frozen.
    """
    assert options.optim in _BUILDERS, "checked by config.validation"
    if all(parameter.stop_gradient for parameter in model.parameters()):
        raise ValueError("all parameters of the model are frozen; choose an adapter, or unfreeze parameters")
    groups = parameter_groups(model, options.weight_decay)
    return _BUILDERS[options.optim](_Request(model, groups, options, rounding, gather or _no_shards))


@dataclass(frozen=True)
class _Request:
    """Arguments of the functions in `_BUILDERS`: the arguments of `build_optimizer`, and the parameter groups."""

    model: TrainableModel
    groups: list[dict[str, Any]]
    options: OptimConfig
    rounding: StochasticRounding | None
    gather: GatherShards


def _no_shards(part: paddle.Tensor, shard: Shard) -> paddle.Tensor:
    raise AssertionError(f"{part.name} is sharded, but build_optimizer has no `gather`")


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
    if not groups:  # this stage has no trained parameter, but Paddle's optimizer needs a parameter
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
    """Return whether a parameter is bfloat16 on the CPU; Paddle's AdamW has no kernel for this case."""
    return parameter.dtype == paddle.bfloat16 and parameter.place.is_cpu_place()


def _adamw_mini(request: _Request) -> AdamWMini:
    blocks = {
        parameter.name: num_blocks(name, parameter.shape, head_dim_of(name, request.model.config))
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
