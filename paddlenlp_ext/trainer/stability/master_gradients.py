"""Float32 gradients of parameters in half precision ("master gradients", `amp_master_grad`).

A backward pass adds a gradient to the sum so far only if both have the same dtype. Two hooks surround the addition: the
first takes the float32 sum away, so that the gradient is stored alone, and the second adds it to the sum in float32.
Between backward passes `parameter.grad` is float32, for every reader: collectives, clipping, optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import paddle

from paddlenlp_ext.paddle_compat import after_gradient, share_storage
from paddlenlp_ext.sharding_spec import placement_of, set_placement


def widen_gradients(parameters: Iterable[paddle.Tensor]) -> Callable[[], None]:
    """Make backward passes accumulate the gradients of parameters in half precision in float32 ("master gradients").

    Returns:
        Function that ends this.
    """
    ends = [_widen_gradient(parameter) for parameter in parameters if parameter.dtype != paddle.float32]

    def end() -> None:
        for each in ends:
            each()

    return end


def _widen_gradient(parameter: paddle.Tensor) -> Callable[[], None]:
    """Widen the gradient of one parameter; return the function that ends this."""
    total: paddle.Tensor | None = None

    @paddle.no_grad()
    def take_total(gradient: paddle.Tensor) -> None:
        nonlocal total
        total = None if parameter.grad is None else parameter.grad.view(parameter.shape)  # not freed by the next line
        parameter.clear_gradient(False)

    @paddle.no_grad()
    def add_to_total() -> None:
        nonlocal total
        if not placement_of(parameter).has_float32_gradient:
            return
        assert parameter.grad is not None, "called after the gradient is stored"
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
