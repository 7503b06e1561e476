"""Load the weights of a sharded model; each rank reads only the slices that it holds."""

from __future__ import annotations

from paddlenlp_ext.checkpoint.load_weights import load_parameters
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.paddle_compat import has_storage
from paddlenlp_ext.peft.modules_to_save import base_parameters
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.sharding_spec import is_materialized


def load_shards(model: TrainableModel, source: WeightSource) -> None:
    """Load the base model weights into a sharded model that was built with unallocated parameters.

    The adapter stays unchanged. A parameter that the adapter trains in full (peft/modules_to_save.py) is also
    initialized from the base weights, unless a stored adapter has already set the parameter.

    Args:
        model: `CausalLM` or `PeftModel`.
        source: weights of the full base model.

    Raises:
        ValueError: the stored tensors do not match the model.
    """
    decoder = model.get_base_model()
    loaded: set[str] = set()
    if isinstance(model, PeftModel) and model.adapter.replaced.are_loaded:
        loaded = set(model.adapter.replaced.names)
    parameters = {name: parameter for name, parameter in base_parameters(decoder).items() if name not in loaded}
    for parameter in parameters.values():
        if is_materialized(parameter) and not has_storage(parameter):
            parameter.initialize()
    load_parameters(parameters, source, decoder.remote_parameters | loaded)
