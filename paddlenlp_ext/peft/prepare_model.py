"""`prepare_model_for_kbit_training`: prepare a quantized base model for training with an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def prepare_model_for_kbit_training(
    model: Any,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Freeze a base model and enable activation recomputation, in place; return the model.

    Unlike in Hugging Face PEFT, the weights of norms, embedding and lm_head keep their dtype. Norms and losses are
    computed in float32.

    Args:
        model: base model from `AutoModelForCausalLM`, quantized or not.
        use_gradient_checkpointing: recompute the activations of every layer in the backward pass.
        gradient_checkpointing_kwargs: see `CausalLM.gradient_checkpointing_enable`.

    Raises:
        ValueError: `gradient_checkpointing_kwargs` has an unknown option.

    Examples:
        >>> from paddlenlp_ext import AutoModelForCausalLM, prepare_model_for_kbit_training
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> base = AutoModelForCausalLM.from_config({"model_type": "llama", "vocab_size": 32, **sizes})
        >>> model = prepare_model_for_kbit_training(base)
        >>> model.is_gradient_checkpointing, any(not each.stop_gradient for each in model.parameters())
        (True, False)
    """
    if use_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)
    for parameter in model.parameters():
        parameter.stop_gradient = True
    return model
