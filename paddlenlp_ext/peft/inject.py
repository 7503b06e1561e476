"""Wrap the target layers of a model with adapters, and undo it on failure; select targets by name or pattern."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paddle import nn

from paddlenlp_ext.nn.submodules import layer_at, replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.modules_to_save import (
    covers,
    detach_adapter,
    excluded_targets,
    replace_parameters,
)
from paddlenlp_ext.peft.trainable_token_indices import EMBEDDING, TABLES, TrainableTokens, tokens_of_model
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


def inject(model: TrainableModel, config: PeftConfig, seed: int = 42) -> None:
    """Freeze every parameter of the model, then wrap the target layers of the config.

    Raises:
        ValueError: the model already has an adapter, a target matches no layer, or the layers were quantized for
            another adapter.
    """
    if next(adapter_layers(model), None) is not None:
        raise ValueError("the model already has an adapter; merge it (merge_and_unload) before adding another")
    targets = config.targets(model)
    excluded = set(excluded_targets(config, targets))
    if targets and len(excluded) == len(targets):
        raise ValueError("exclude_modules and modules_to_save leave no layer to adapt; exclude fewer layers")
    if config.exclude_modules and not excluded:
        logger.warning("exclude_modules: %s matches no target", ", ".join(config.exclude_modules))
    for parameter in model.parameters():
        parameter.stop_gradient = True
    bases = {name: layer_at(model, name) for name in targets if name not in excluded}
    replaced = [name for name in TABLES if covers(config.modules_to_save, name)]
    if model.config.tie_word_embeddings and replaced and EMBEDDING in bases:
        raise ValueError(
            "modules_to_save: the base ties lm_head to embed_tokens, which is also a target of the adapter; name it in "
            "one of the two only"
        )
    tokens = tokens_of_model(config.trainable_token_indices, model, replaced, bases)
    wrap = config.wrapper(bases, seed)
    for name, base in bases.items():
        replace_layer(model, name, wrap(name, base))
    for name, ids in tokens.items():
        replace_layer(model, name, TrainableTokens(layer_at(model, name), ids))
    replace_parameters(model, config)
    _check_residual_bases(model)


def _check_residual_bases(model: nn.Layer) -> None:
    """Check that each layer quantized as a residual has the adapter that holds the subtracted part of its weight.

    Raises:
        ValueError: another adapter holds the part.
    """
    covered = {id(layer.base) for _, layer in adapter_layers(model) if getattr(layer, "base_is_residual", False)}
    for name, base in quantized_layers(model).items():
        if base.is_residual and id(base) not in covered:
            raise ValueError(
                f"{name.removesuffix('.base')}: a part of the weight was subtracted before quantization, and another "
                "adapter (PiSSA, LoftQ) holds it; load the original model again for this adapter"
            )


@contextmanager
def undone_on_failure(model: TrainableModel) -> Iterator[None]:
    """If the block raises, remove the adapter that it added and restore the parameters' `stop_gradient`."""
    had_adapter = next(adapter_layers(model), None) is not None
    frozen = [(parameter, parameter.stop_gradient) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        if not had_adapter:
            detach_adapter(model)
        for parameter, stop_gradient in frozen:
            parameter.stop_gradient = stop_gradient
        raise
