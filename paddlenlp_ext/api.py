"""Entry points that join models, adapters and data: what a user calls, and no layer below needs."""

from __future__ import annotations

import os
from typing import Any

from paddlenlp_ext.checkpoint.hub import resolve_base
from paddlenlp_ext.checkpoint.model_config import read_model_config
from paddlenlp_ext.config.sections import DataConfig
from paddlenlp_ext.data import dataset
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.merge import merge_adapter as merge
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.peft.save_and_load import read_adapter


class AutoPeftModelForCausalLM:
    """Loads an adapter together with the base model that it names; never instantiated itself."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        adapter_name: str = "default",
        is_trainable: bool = True,
        dtype: str = "float32",
        use_flash_attention: bool = True,
    ) -> PeftModel:
        """Load a base and its adapter, in evaluation mode; a base that was quantized in training is quantized again.

        Args:
            folder: an adapter folder that names its base.
            adapter_name, is_trainable: as `PeftModel.from_pretrained`'s.
            dtype, use_flash_attention: as `AutoModelForCausalLM.from_pretrained`'s.

        Raises:
            ValueError: no adapter or no base there, or an adapter of another model.
        """
        stored = read_adapter(folder)
        if not stored.base_model:
            raise ValueError(f"{stored.folder} does not name its base model; load it and use PeftModel.from_pretrained")
        base = resolve_base(stored.base_model, stored.folder, "load the base and use PeftModel.from_pretrained")
        model = AutoModelForCausalLM.from_pretrained(
            stored.base_model,
            dtype,
            use_flash_attention,
            quantization_config=stored.base_quantization(read_model_config(base)),
            before_quantizing=stored.before_quantizing,
        )
        return PeftModel.from_files(model, stored, adapter_name, is_trainable)


def merge_adapter(
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    **options: Any,
) -> merge.MergeReport:
    """Write the base model with the adapter folded in, as `llm/merge_peft_params.py` does.

    Args:
        adapter: an adapter folder.
        output: the folder to make.
        base: the base model, None for the one that the adapter names.
        options: `dtype`, `overwrite`, `allow_pickle` and `merge_base` of `peft.merge.merge_adapter.merge_adapter`.

    Raises:
        ValueError: as `peft.merge.merge_adapter.merge_adapter`; nothing is left at `output` then.
    """
    return merge.merge_adapter(adapter, output, AutoModelForCausalLM.from_pretrained, base, **options)


def load_dataset(
    dataset_name_or_path: str | os.PathLike[str], split: str, tokenizer: Any, **keys: Any
) -> dataset.TokenizedDataset:
    """Tokenize a split of a dataset, or find it tokenized.

    Args:
        dataset_name_or_path: a folder with `train.json` and `dev.json`, or "inflection".
        split: "train" or "dev".
        tokenizer: from `AutoTokenizer`.
        keys: further data keys of a run, such as `max_length` or `chat_template`.

    Raises:
        ValueError: no such dataset, or bad rows in it.
    """
    config = DataConfig(dataset_name_or_path=os.fspath(dataset_name_or_path), **keys)
    return dataset.load_dataset(config, split, tokenizer)
