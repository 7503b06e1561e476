"""An adapter put around the layers of a model, and taken off again where that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paddle import nn

from paddlenlp_ext.nn.module_utils import layer_at, replace_layer
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layer import adapter_layers, take_off
from paddlenlp_ext.quantization.model import quantized_linears


def inject(model: nn.Layer, config: PeftConfig, seed: int = 42) -> None:
    """Freeze every parameter of the model, then wrap the layers that the config asks for.

    Raises:
        ValueError: the model already carries an adapter, the config asks for a layer it lacks, or the layers were
            quantized for another adapter.
    """
    if next(adapter_layers(model), None) is not None:
        raise ValueError("the model already carries an adapter; merge it (merge_and_unload) before adding another.")
    targets = config.targets(model)
    for parameter in model.parameters():
        parameter.stop_gradient = True
    bases = {name: layer_at(model, name) for name in targets}
    wrap = config.wrapper(bases, seed)
    for name, base in bases.items():
        replace_layer(model, name, wrap(name, base))
    _require_whole_weights(model)


def _require_whole_weights(model: nn.Layer) -> None:
    """Check that what was taken off weights before they were quantized is in the adapter over them.

    Raises:
        ValueError: it is in another adapter.
    """
    completed = {id(layer.base) for _, layer in adapter_layers(model) if getattr(layer, "base_lacks_start", False)}
    for name, base in quantized_linears(model).items():
        if base.lacks_start and id(base) not in completed:
            raise ValueError(
                f"{name.removesuffix('.base')} was quantized without a part that another adapter holds (PiSSA, LoftQ): "
                "load the original model again for this one."
            )


@contextmanager
def undone_on_failure(model: nn.Layer) -> Iterator[None]:
    """Where the block raises, an adapter that it put on comes off and what it froze trains again."""
    had_adapter = next(adapter_layers(model), None) is not None
    frozen = [(parameter, parameter.stop_gradient) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        if not had_adapter:
            take_off(model)
        for parameter, stop_gradient in frozen:
            parameter.stop_gradient = stop_gradient
        raise
