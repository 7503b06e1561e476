"""An optimizer's tensors by the model's parameter names.

Paddle names them after its own running numbers (`linear_7.w_0_moment1_0`), which another process need not repeat.
Here they are `<structured parameter name>.<moment1|moment2|beta1_pow_acc|beta2_pow_acc|master_weight>`; the optimizers
with small state name theirs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.paddle_compat import accumulators, create_accumulators, master_weights
from paddlenlp_ext.sharding_spec import set_placement, shard_of
from paddlenlp_ext.trainer.optimizers.base import SmallStateOptimizer
from paddlenlp_ext.trainer.optimizers.offload import OffloadedOptimizer

Optimizer = paddle.optimizer.Optimizer | SmallStateOptimizer | OffloadedOptimizer
_MASTER = "master_weight"


def _optimizer_tensors(optimizer: Optimizer, parameters: dict[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
    """The live tensors, created where no step was made yet."""
    if isinstance(optimizer, OffloadedOptimizer):
        return _optimizer_tensors(optimizer.inner, parameters)
    if isinstance(optimizer, SmallStateOptimizer):
        return {
            f"{name}.{kind}": tensor
            for name, parameter in parameters.items()
            for kind, tensor in optimizer.state_of(parameter).items()
        }
    create_accumulators(optimizer, list(parameters.values()))
    tensors = {}
    for name, parameter in parameters.items():
        master = master_weights(optimizer).get(parameter.name)
        if master is not None:
            tensors[f"{name}.{_MASTER}"] = master
        for kind, by_parameter in accumulators(optimizer).items():
            key = parameter.name if master is None else master.name
            tensors[f"{name}.{kind}"] = by_parameter[key]
    for key, tensor in tensors.items():
        parameter = parameters[key.rpartition(".")[0]]
        if tensor.shape == parameter.shape:
            set_placement(tensor, shard=shard_of(parameter))  # sharded as the parameter is
    return tensors


def optimizer_state(optimizer: Optimizer, parameters: dict[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
    """All that the optimizer knows of `parameters` (structured name to parameter)."""
    return _optimizer_tensors(optimizer, parameters)


@paddle.no_grad()
def restore_optimizer_state(
    optimizer: Optimizer,
    parameters: dict[str, paddle.Tensor],
    saved: Mapping[str, Any],
    of_all: Callable[[set[str]], set[str]] = set,
) -> None:
    """Put saved tensors back, bit for bit.

    Args:
        optimizer: of these parameters.
        parameters: by structured name; those that this process updates.
        saved: whole tensors, of Paddle or NumPy, of all processes' parameters.
        of_all: the union of all processes' sets of names.

    Raises:
        ValueError: the saved state is of other parameters; the message names the first differences.
    """
    live = _optimizer_tensors(optimizer, parameters)
    wanted = of_all(set(live))
    missing, surplus = sorted(wanted - set(saved)), sorted(set(saved) - wanted)
    if missing or surplus:
        raise ValueError(
            f"the checkpoint's optimizer state is of another optimizer or other parameters: {len(missing)} missing "
            f"({', '.join(missing[:3])}), {len(surplus)} surplus ({', '.join(surplus[:3])}). Set optim, and what "
            "chooses the parameters that train, as they were"
        )
    for name, tensor in live.items():
        value, cut = saved[name], shard_of(tensor)
        value = value if cut is None else value[cut.index]
        if list(value.shape) != list(tensor.shape):
            raise ValueError(f"{name} in the checkpoint has shape {list(value.shape)}, here {list(tensor.shape)}")
        tensor.set_value(np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value)
