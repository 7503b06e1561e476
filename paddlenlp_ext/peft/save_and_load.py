"""State dicts of adapters with Hugging Face PEFT's keys: `get_peft_model_state_dict`, `set_peft_model_state_dict`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.formats.read_adapter import adapter_of_tensors
from paddlenlp_ext.peft.peft_model import PeftModel


class LoadResult(NamedTuple):
    """Keys that did not match when a state dict was loaded; always empty, because a mismatch raises an error."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def get_peft_model_state_dict(
    model: PeftModel, state_dict: Mapping[str, paddle.Tensor] | None = None, adapter_name: str = "default"
) -> dict[str, paddle.Tensor]:
    """Return an adapter's tensors as a dict with the keys of `adapter_model.safetensors`.

    Args:
        model: model with the adapter.
        state_dict: state dict of the model with the values to return; None: use the model's current values.
        adapter_name: name of the adapter.

    Raises:
        ValueError: no adapter has this name, the active adapter is merged, or `state_dict` lacks a tensor.

    Examples:
        >>> from paddlenlp_ext import AutoModelForCausalLM, LoRAConfig, get_peft_model, get_peft_model_state_dict
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> base = AutoModelForCausalLM.from_config({"model_type": "llama", "vocab_size": 32, **sizes})
        >>> model = get_peft_model(base, LoRAConfig(r=4, target_modules=["q_proj"]))
        >>> sorted(get_peft_model_state_dict(model))[0]
        'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    with _active(model, adapter_name) as adapter:
        values = None if state_dict is None else _select(state_dict, adapter)
        return adapter.file_tensors(values)[1]


def set_peft_model_state_dict(
    model: PeftModel, peft_model_state_dict: Mapping[str, Any], adapter_name: str = "default"
) -> LoadResult:
    """Load an adapter's tensors from a state dict with the keys of `adapter_model.safetensors`.

    Args:
        model: model with an adapter of the same method and shapes.
        peft_model_state_dict: tensors or arrays, such as the result of `get_peft_model_state_dict`.
        adapter_name: name of the adapter to load into.

    Raises:
        ValueError: no adapter has this name, the active adapter is merged, or tensors are missing, unexpected or
            have the wrong shape; the adapter is unchanged.

    Examples:
        >>> from paddlenlp_ext import AutoModelForCausalLM, LoRAConfig, get_peft_model
        >>> from paddlenlp_ext import get_peft_model_state_dict, set_peft_model_state_dict
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> base = AutoModelForCausalLM.from_config({"model_type": "llama", "vocab_size": 32, **sizes})
        >>> model = get_peft_model(base, LoRAConfig(r=4, target_modules=["q_proj"]))
        >>> set_peft_model_state_dict(model, get_peft_model_state_dict(model)).unexpected_keys
        []
    """
    arrays = {key: _array(value) for key, value in peft_model_state_dict.items()}
    where = Path("peft_model_state_dict")
    with _active(model, adapter_name) as adapter:
        fields = adapter.file_tensors()[0]
        stored = adapter_of_tensors(where, adapter.peft_config, fields, arrays).for_base(model.base_model.config)
        adapter.load_tensors(stored.tensors, str(where))
    return LoadResult([], [])


@contextmanager
def _active(model: PeftModel, name: str) -> Iterator[Adapter]:
    """Context manager: activate the adapter `name` and yield it."""
    active = model.active_adapter
    model.set_adapter(name)
    try:
        yield model.adapter
    finally:
        model.set_adapter(active)


def _select(state_dict: Mapping[str, paddle.Tensor], adapter: Adapter) -> dict[str, paddle.Tensor]:
    """Select an adapter's tensors from a state dict of the model; return them keyed as in `Adapter.adapter_state`."""
    by_name = {key.removeprefix("base_model.").replace(".base.", "."): value for key, value in state_dict.items()}
    missing = [name for name in adapter.adapter_state() if name not in by_name]
    if missing:
        raise ValueError(f"state_dict: {missing[0]} is missing; pass model.state_dict()")
    return {name: by_name[name] for name in adapter.adapter_state()}


def _array(value: Any) -> np.ndarray:
    if isinstance(value, paddle.Tensor):
        return (value.astype("float32") if value.is_floating_point() else value).numpy()
    return np.asarray(value)
