"""Wrappers of the private interfaces of PaddlePaddle that this package uses.

Paddle may change private interfaces without notice. Only this file uses private interfaces
(`tests/test_paddle_compat.py`), so only this file needs changes for a new Paddle release. Importing this module checks
the installed release:

    3.3.x                        no message, because this release is tested
    another release              `UserWarning` that names the tested release
    a required name is missing   `ImportError` with the missing name and the release to install

`_runtime.check_paddle_release` rejects releases before 3.0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import paddle
from paddle import nn
from paddle.base import core, framework
from paddle.distributed.fleet.base import topology
from paddle.distributed.parallel import ParallelEnv

TESTED_RELEASE = "3.3"

_REQUIRED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (paddle.Tensor, ("_is_initialized", "_clear_data", "_share_buffer_to", "_register_backward_hook")),
    (paddle._C_ops, ("empty",)),
    (paddle.optimizer.AdamW, ("_create_accumulators", "_moment1_acc_str", "_beta1_pow_acc_str")),
    (
        core,
        (
            "TCPStore",
            "create_or_get_global_tcp_store",
            "get_low_precision_op_list",
            "_get_phi_kernel_name",
            "_get_registered_phi_kernels",
        ),
    ),
    (topology, ("_HYBRID_PARALLEL_GROUP",)),
)


def check_release(version: str, required: tuple[tuple[Any, tuple[str, ...]], ...] = _REQUIRED) -> None:
    """Warn about an untested Paddle release, and check that the required private names exist.

    Args:
        version: version of Paddle, such as "3.3.1".
        required: pairs of a Paddle object and its required attributes.

    Raises:
        ImportError: an attribute is missing.
    """
    remedy = f"install paddlepaddle {TESTED_RELEASE}"
    missing = [f"{_name_of(owner)}.{name}" for owner, names in required for name in names if not hasattr(owner, name)]
    if missing:
        raise ImportError(f"paddlepaddle {version} lacks {', '.join(missing)}, which paddlenlp_ext needs; {remedy}")
    if not f"{version}.".startswith(f"{TESTED_RELEASE}."):
        warnings.warn(
            f"paddlepaddle {version}: paddlenlp_ext is tested only with {TESTED_RELEASE}; if anything fails, {remedy}",
            stacklevel=2,
        )


def _name_of(owner: Any) -> str:
    return getattr(owner, "__qualname__", None) or owner.__name__


check_release(paddle.__version__)


# -- tensors ----------------------------------------------------------------------------------------------------------

empty_unchecked: Callable[..., paddle.Tensor] = paddle._C_ops.empty
"""`paddle.empty(shape, dtype, place)` without its argument checks, which take 3 us per call."""


def has_storage(tensor: paddle.Tensor) -> bool:
    """Return whether memory is allocated for a tensor; False for tensors under `LazyGuard` and after `free_storage`."""
    return tensor._is_initialized()


def is_symbolic(tensor: object) -> bool:
    """Return whether a tensor is a symbolic value of a static graph that is being traced (`paddle.jit.to_static`)."""
    return isinstance(tensor, paddle.pir.Value)


def axis_sizes(tensor: paddle.Tensor) -> list[Any]:
    """Return the shape of a tensor: integers, and scalar tensors for the dynamic axes of a static graph."""
    return [paddle.shape(tensor)[axis] if size < 0 else size for axis, size in enumerate(tensor.shape)]


def free_storage(tensor: paddle.Tensor) -> None:
    """Free the memory of a tensor in place; its shape and dtype are kept."""
    tensor._clear_data()


def share_storage(source: paddle.Tensor, target: paddle.Tensor) -> None:
    """Make `target` share the memory of `source`."""
    source._share_buffer_to(target)


def after_gradient(parameter: paddle.Tensor, call: Callable[[], None]) -> None:
    """Call a function whenever a backward pass has accumulated the gradient of a parameter.

    The function cannot be unregistered.
    """
    parameter._register_backward_hook(call)


# -- layers -----------------------------------------------------------------------------------------------------------


def own_parameters(layer: nn.Layer) -> dict[str, paddle.Tensor]:
    """Return the live dictionary of a layer's own parameters, without the parameters of its sublayers."""
    return layer._parameters


def own_buffers(layer: nn.Layer) -> dict[str, paddle.Tensor]:
    """Return the live dictionary of a layer's own buffers, without the buffers of its sublayers."""
    return layer._buffers


def registered_member(layer: nn.Layer, name: str) -> Any:
    """Return the parameter, sublayer or buffer `name` of a layer.

    Raises:
        AttributeError: the layer does not have a member of this name.
    """
    for group in ("_parameters", "_sub_layers", "_buffers"):
        if name in layer.__dict__.get(group, {}):
            return layer.__dict__[group][name]
    raise AttributeError(f"{type(layer).__name__} has no attribute {name!r}")


# -- optimizers -------------------------------------------------------------------------------------------------------


def has_forward_hooks(layer: nn.Layer) -> bool:
    """Return whether a layer has hooks that run before or after its forward pass."""
    hooked: Any = layer
    return bool(hooked._forward_pre_hooks or hooked._forward_post_hooks)


def create_accumulators(optimizer: paddle.optimizer.Optimizer, parameters: list[paddle.Tensor]) -> None:
    """Create the optimizer state of the parameters that have no state yet."""
    with warnings.catch_warnings():
        # Paddle warns about half-precision parameters without fp32 master weights, although the optimizer state is
        # always fp32.
        warnings.filterwarnings("ignore", "Accumulating with FP16 or BF16")
        optimizer._create_accumulators(framework.default_main_program().global_block(), parameters)


def accumulators(optimizer: paddle.optimizer.Optimizer) -> dict[str, dict[str, paddle.Tensor]]:
    """Return the optimizer state: kind (such as "moment1") -> parameter name -> tensor."""
    return optimizer._accumulators


def master_weights(optimizer: paddle.optimizer.Optimizer) -> dict[str, paddle.Tensor]:
    """Return a dict from the names of half-precision parameters to their fp32 master weights."""
    return optimizer._master_weights


def parameter_groups(optimizer: paddle.optimizer.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups that were passed to the optimizer."""
    groups = optimizer._param_groups
    assert groups is not None, "the optimizer must have parameters"
    return cast("list[dict[str, Any]]", groups)


def adam_constants(optimizer: paddle.optimizer.AdamW) -> tuple[float, float, float]:
    """Return beta1, beta2 and epsilon of an AdamW optimizer."""
    beta1, beta2, epsilon = (float(value) for value in (optimizer._beta1, optimizer._beta2, optimizer._epsilon))
    return beta1, beta2, epsilon


def adam_state_kinds(optimizer: paddle.optimizer.AdamW) -> tuple[str, str, str, str]:
    """Return the keys of `accumulators` for moment1, moment2, the power of beta1 and the power of beta2."""
    return (
        optimizer._moment1_acc_str,
        optimizer._moment2_acc_str,
        optimizer._beta1_pow_acc_str,
        optimizer._beta2_pow_acc_str,
    )


# -- kernels ----------------------------------------------------------------------------------------------------------


_private_core: Any = core


@contextmanager
def recorded_operators(names: set[str]) -> Iterator[None]:
    """Add the kernel names of the operators that Paddle calls within the block to `names`, without gradients."""
    before = paddle.get_flags("FLAGS_low_precision_op_list")
    paddle.set_flags({"FLAGS_low_precision_op_list": 1})
    core.clear_low_precision_op_list()
    try:
        yield
    finally:
        names.update(_private_core._get_phi_kernel_name(name) for name in core.get_low_precision_op_list())
        paddle.set_flags(before)


def kernel_devices() -> dict[str, set[str]]:
    """Return the types of devices of each kernel of Paddle, such as {"CPU", "GPU"}."""
    registered = _private_core._get_registered_phi_kernels()
    return {name: {str(key)[1:].partition(",")[0] for key in keys} for name, keys in registered.items()}


# -- process groups ---------------------------------------------------------------------------------------------------


def gloo_group_class() -> Any:
    """Return the class of gloo process groups, which is missing in Paddle builds without gloo."""
    return core.ProcessGroupGloo


def tcp_store(host: str, port: int, is_server: bool, num_clients: int) -> Any:
    """Return a key-value store at `host:port`; the server waits until `num_clients` processes have connected."""
    return core.TCPStore(host, port, is_server, num_clients)


def launcher_store() -> Any:
    """Return the key-value store that the launcher started for all processes of the job."""
    return core.create_or_get_global_tcp_store()


def set_missing_device_id() -> None:
    """Set the device id of this process to 0 if Paddle has not set an id; Paddle's pipeline code requires an id."""
    if not hasattr(ParallelEnv, "_device_id"):
        setattr(ParallelEnv, "_device_id", 0)  # noqa: B010 (declared on instances only)


def forget_hybrid_groups() -> None:
    """Make the next `fleet.init` of this process create new groups instead of reusing existing groups."""
    topology._HYBRID_PARALLEL_GROUP = None
