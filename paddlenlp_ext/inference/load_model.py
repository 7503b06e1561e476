"""Load a model for prediction: choose device and dtype, load base and adapter, merge, and quantize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paddle

from paddlenlp_ext.checkpoint.hub import resolve_base
from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.inference.arguments import NO_VALUE, LoadArguments
from paddlenlp_ext.inference.device_and_dtype import choose_device_or_cpu, choose_dtype
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles, read_adapter
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantization_report, quantize_linears
from paddlenlp_ext.static_graph.static_model import StaticModel
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger("paddlenlp_ext.predict")
ConfigCheck = Callable[[Mapping[str, Any]], None]
"""Function that checks the content of config.json before the weights are read."""


def find_model_and_adapter(arguments: LoadArguments) -> tuple[str, str | None]:
    """Return the name of the base model, and the adapter folder or None.

    `model_name_or_path` may be an adapter folder. The name of the base is then read from adapter_config.json, or
    otherwise from run_config.json, in this folder.

    Raises:
        ValueError: the adapter folder does not record a base, the base is not found, two adapters are given, or the
            folder contains a model and an adapter and `lora_path` is unset.
    """
    named = Path(arguments.model_name_or_path).expanduser()
    if not (named / "adapter_config.json").is_file() or (named / "config.json").is_file():
        if (named / "adapter_config.json").is_file() and not arguments.adapter_path:
            raise ValueError(
                f"--model_name_or_path {named} contains a model and an adapter; add --lora_path {named} to use both, "
                "or move the model or the adapter to another folder"
            )
        return arguments.model_name_or_path, arguments.adapter_path
    if arguments.adapter_path:
        raise ValueError(
            f"--model_name_or_path {named} is an adapter, and --lora_path names another adapter; pass the base model "
            "with --model_name_or_path"
        )
    for file, key in (("adapter_config.json", "base_model_name_or_path"), ("run_config.json", "model_name_or_path")):
        base = read_json_object(named / file).get(key) if (named / file).is_file() else None
        if base:
            resolve_base(base, named, f"--model_name_or_path BASE --lora_path {named}")
            return base, str(named)
    raise ValueError(f"{named} does not name its base model; pass --model_name_or_path BASE --lora_path {named}")


def find_source(base: str, adapter: str | None) -> tuple[ModelSource, AdapterFiles | None, dict[str, Any]]:
    """Return the base model, the stored adapter or None, and the options that load the base as in training.

    Raises:
        ValueError: a model or adapter is not found, or the base is stored in a different quantized format than in
            training.
    """
    source = ModelSource.resolve(base)
    if adapter is None:
        return source, None, {}
    stored = read_adapter(adapter)
    source = replace(source, config_overrides=stored.base_overrides(source.config))
    quantization = stored.base_quantization(source.config)
    before = stored.for_base(source.decoder_config()).before_quantizing
    return source, stored, {"quantization_config": quantization, "before_quantizing": before}


def load_tokenizer(base: str, adapter: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the training run saved with the adapter, else the base model's tokenizer."""
    has_own = adapter is not None and (Path(adapter).expanduser() / "tokenizer_config.json").is_file()
    return AutoTokenizer.from_pretrained(adapter if adapter is not None and has_own else base)


def load_model(
    arguments: LoadArguments,
    base: str,
    adapter: str | None,
    quant_type: str | None = None,
    check_config: ConfigCheck | None = None,
) -> Any:
    """Load a model, merge the adapter if its method and the base allow merging, and quantize to `quant_type`.

    Raises:
        ValueError: see `load_unmerged` and `quantize`.
    """
    model = load_unmerged(arguments, base, adapter, check_config)
    model = model.merge_and_unload() if can_merge(model) else model
    quantize(model, quant_type)
    return model


def load_unmerged(
    arguments: LoadArguments,
    base: str,
    adapter: str | None,
    check_config: ConfigCheck | None = None,
    model_class: Any = AutoModelForCausalLM,
) -> Any:
    """Load a model, with its adapter in separate layers.

    If the base was quantized in training, it is quantized in the same way, unless its files are already quantized.

    Args:
        arguments: device, dtype and attention of the model.
        base: name of the base model.
        adapter: adapter folder, or None.
        check_config: function called with the contents of config.json before the weights are read.
        model_class: `AutoModelForCausalLM` or `AutoModelForSequenceClassification`.

    Raises:
        ValueError: the device is unknown or does not support the dtype, or a file cannot be used.
    """
    source, stored, options = find_source(base, adapter)
    if check_config is not None:
        check_config(source.config)
    model = load_base(arguments, source, options, model_class)
    return model if stored is None else PeftModel.from_files(model, stored)


def load_base(
    arguments: LoadArguments, source: ModelSource, options: Mapping[str, Any], model_class: Any = AutoModelForCausalLM
) -> Any:
    """Load a base model on the device and in the dtype of the arguments.

    Args:
        arguments: device, dtype and attention of the model.
        source: the base model.
        options: quantization options, from `find_source`.
        model_class: `AutoModelForCausalLM` or `AutoModelForSequenceClassification`.

    Raises:
        ValueError: see `load_unmerged`.
    """
    choose_device_or_cpu(arguments.device or "auto")
    dtype = choose_dtype(arguments.dtype, paddle.get_device())
    model = model_class.from_pretrained(
        source, **options, dtype=dtype, use_flash_attention=arguments.use_flash_attention
    )
    if model.quantization is not None:
        logger.info("%s", quantization_report(model))
    return model


def load_static(arguments: LoadArguments, folder: str, model_prefix: str, quant_type: str | None) -> StaticModel:
    """Load an exported static graph.

    Raises:
        ValueError: see `StaticModel`; or `--dtype` or `--quant_type` differs from the export.
    """
    choose_device_or_cpu(arguments.device or "auto")
    model = StaticModel(ModelSource.resolve(folder).path, model_prefix)
    for name, requested, value in (
        ("dtype", arguments.dtype, model.dtype_name),
        ("quant_type", quant_type, model.quant_type or ""),
    ):
        if requested is not None and ("" if requested in NO_VALUE else requested) != value:
            raise ValueError(
                f"--{name} {requested or repr('')}: {folder} was exported with {value or 'none'}; leave --{name} out"
            )
    return model


def can_merge(model: Any) -> bool:
    """Return whether a model has an adapter that can be merged.

    The result is False for a quantized base, because merging would dequantize the base.
    """
    return isinstance(model, PeftModel) and model.peft_config.mergeable and model.quantization is None


def quantize(model: Any, quant_type: str | None) -> None:
    """Quantize the linear layers of a loaded model to the format `quant_type`; do nothing without a format.

    Raises:
        ValueError: the model is already quantized, or has an adapter that cannot be merged.
    """
    if quant_type not in ("weight_only_int8", "weight_only_int4"):
        return
    if isinstance(model, PeftModel):
        raise ValueError(
            f"--quant_type {quant_type}: this adapter cannot be merged into the base; leave out --quant_type"
        )
    quantize_linears(model, QuantizationConfig(algo=quant_type))


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the context length of a model, including RoPE scaling; None if config.json does not limit it."""
    if config.get("max_position_embeddings") is None:
        return None
    return DecoderConfig.from_dict(config).max_context
