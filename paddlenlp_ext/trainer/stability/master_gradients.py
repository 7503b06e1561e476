"""Float32 gradients of parameters in half precision ("master gradients", `amp_master_grad`).

Paddle can add a new gradient to `parameter.grad` only if both have the same dtype. Two hooks therefore surround the
accumulation. The first hook removes the float32 sum, and Paddle stores the new half-precision gradient. The second hook
adds the new gradient to the float32 sum. Collectives, clipping and optimizers read the sum in `parameter.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import paddle

from paddlenlp_ext.paddle_compat import after_gradient, share_storage
from paddlenlp_ext.sharding_spec import placement_of, set_placement


def widen_gradients(parameters: Iterable[paddle.Tensor]) -> Callable[[], None]:
    """Accumulate the gradients of half-precision parameters in float32.

    Returns:
        Function that removes the hooks.
    """
    ends = [_widen_gradient(parameter) for parameter in parameters if parameter.dtype != paddle.float32]

    def end() -> None:
        for each in ends:
            each()

    return end


def _widen_gradient(parameter: paddle.Tensor) -> Callable[[], None]:
    """Accumulate the gradient of one parameter in float32; return the function that removes the hooks."""
    total: paddle.Tensor | None = None

    @paddle.no_grad()
    def take_total(gradient: paddle.Tensor) -> None:
        nonlocal total
        # The view keeps the sum alive after the next line frees parameter.grad.
        total = None if parameter.grad is None else parameter.grad.view(parameter.shape)
        parameter.clear_gradient(False)

    @paddle.no_grad()
    def add_to_total() -> None:
        nonlocal total
        if not placement_of(parameter).has_float32_gradient:
            return
        assert parameter.grad is not None, "the gradient must be stored before the hook is called"
        wide = parameter.grad.astype("float32")
        share_storage(wide if total is None else total.add_(wide), parameter.grad)
        total = None

    def end() -> None:
        hook.remove()
        set_placement(parameter, has_float32_gradient=False)

    set_placement(parameter, has_float32_gradient=True)
    hook = parameter.register_hook(take_total)
    after_gradient(parameter, add_to_total)
    return end
