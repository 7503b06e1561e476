"""Load the weights of a sharded model: each rank reads its own slices and never holds the full model."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.load import load_parameters
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.paddle_compat import has_storage
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.sharding_spec import is_materialized


def load_shards(model: nn.Layer, source: WeightSource) -> None:
    """Load the base weights of a sharded model that was built without values; the adapter's values stay unchanged.

    Args:
        model: a `CausalLM` or `PeftModel`.
        source: tensors of the full base model.

    Raises:
        ValueError: the stored tensors do not match the model.
    """
    decoder = getattr(model, "base_model", model)
    assert isinstance(decoder, TrainableModel)
    parameters = base_parameters(decoder)
    for parameter in parameters.values():
        if is_materialized(parameter) and not has_storage(parameter):
            parameter.initialize()
    load_parameters(parameters, source, decoder.remote_parameters)


def base_parameters(decoder: nn.Layer) -> dict[str, paddle.Tensor]:
    """Return the parameters of the base model, by their names in files; parameters of adapters are left out."""
    adapters = {id(parameter) for _, layer in adapter_layers(decoder) for parameter in layer.own_parameters()}
    return {
        ".".join(part for part in name.split(".") if part != "base"): parameter
        for name, parameter in decoder.named_parameters()
        if id(parameter) not in adapters
    }
