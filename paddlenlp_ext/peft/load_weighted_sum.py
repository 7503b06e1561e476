"""Weighted sum of several stored adapters, loaded as one adapter.

To combine adapters that are already in memory, use `PeftModel.add_weighted_adapter`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.combination_types import combined_factors
from paddlenlp_ext.peft.inject import undone_on_failure
from paddlenlp_ext.peft.low_rank_factors import factors_of
from paddlenlp_ext.peft.peft_model import PeftModel


def load_combined(model: TrainableModel, adapters: Mapping[str | os.PathLike[str], float]) -> PeftModel:
    """Add the weighted sum of several stored adapters to their base model, as a plain LoRA.

    The result is in evaluation mode; the parameters of the LoRA are trainable.

    Args:
        model: base model without an adapter.
        adapters: folder -> weight; a negative weight subtracts the adapter.

    Raises:
        ValueError: `adapters` is empty, or an adapter cannot be read, does not fit the model or is not low-rank; the
            model is unchanged.

    Examples:
        >>> import tempfile
        >>> from paddlenlp_ext import AutoModelForCausalLM, LoRAConfig, get_peft_model, load_combined
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> base = AutoModelForCausalLM.from_config({"model_type": "llama", "vocab_size": 32, **sizes})
        >>> folder = tempfile.mkdtemp()
        >>> get_peft_model(base, LoRAConfig(r=4)).save_pretrained(folder)
        >>> load_combined(AutoModelForCausalLM.from_config(base.config.source), {folder: 0.5}).peft_config.r
        4
    """
    if not adapters:
        raise ValueError("no adapter to combine; pass at least one folder and its weight")
    parts = []
    with undone_on_failure(model):
        for folder in adapters:
            adapted = PeftModel.from_pretrained(model, folder)
            parts.append(factors_of(adapted))
            adapted.unload()
        return PeftModel.from_factors(model, combined_factors(parts, list(adapters.values())))
