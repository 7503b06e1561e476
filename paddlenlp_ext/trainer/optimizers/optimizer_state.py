"""Save and restore optimizer state under the model's parameter names.

Paddle numbers the state tensors (`linear_7.w_0_moment1_0`), and the numbers differ between processes. Checkpoints use
the names `<structured parameter name>.<moment1|moment2|beta1_pow_acc|beta2_pow_acc|master_weight>`. Subclasses of
`SmallStateOptimizer` add other kinds of state tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.paddle_compat import accumulators, create_accumulators, master_weights
from paddlenlp_ext.sharding_spec import set_placement, shard_of
from paddlenlp_ext.trainer.optimizers.offload_state import OffloadedOptimizer
from paddlenlp_ext.trainer.optimizers.small_state_optimizer import SmallStateOptimizer

Optimizer = paddle.optimizer.Optimizer | SmallStateOptimizer | OffloadedOptimizer
_MASTER = "master_weight"


def _optimizer_tensors(optimizer: Optimizer, parameters: dict[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
    """Return the state tensors by name; create the tensors if the optimizer has not taken a step."""
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
            set_placement(tensor, shard=shard_of(parameter))
    return tensors


def optimizer_state(optimizer: Optimizer, parameters: dict[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
    """Return the state tensors of `parameters`, a dict from structured names to parameters."""
    return _optimizer_tensors(optimizer, parameters)


@paddle.no_grad()
def restore_optimizer_state(
    optimizer: Optimizer,
    parameters: dict[str, paddle.Tensor],
    saved: Mapping[str, Any],
    union: Callable[[set[str]], set[str]] = set,
) -> None:
    """Restore saved optimizer state bit for bit.

    Args:
        optimizer: optimizer of `parameters`.
        parameters: parameters that this process updates, by structured name.
        saved: unsharded state of the parameters of all processes, as Paddle or NumPy tensors.
        union: function that returns the union of a set of names over all processes.

    Raises:
        ValueError: the saved state is for different parameters or a different optimizer; the message names the first
            differences.
    """
    live = _optimizer_tensors(optimizer, parameters)
    expected = union(set(live))
    missing, unexpected = sorted(expected - set(saved)), sorted(set(saved) - expected)
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint's optimizer state is for a different optimizer or different parameters: {len(missing)} "
            f"missing ({', '.join(missing[:3])}), {len(unexpected)} unexpected ({', '.join(unexpected[:3])}); use "
            "the same optim, master_weight, fp16_opt_level and trained parameters as the run that wrote the checkpoint"
        )
    for name, tensor in live.items():
        value, shard = saved[name], shard_of(tensor)
        value = value if shard is None else value[shard.index]
        if list(value.shape) != list(tensor.shape):
            raise ValueError(
                f"{name} has shape {list(value.shape)} in the checkpoint, and {list(tensor.shape)} in this run; "
                "resume with the configuration of the checkpoint"
            )
        tensor.set_value(np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value)
