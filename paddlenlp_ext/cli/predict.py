"""Prediction: load a model, with or without an adapter, then answer a file of rows or chat in the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paddle

from paddlenlp_ext.checkpoint.hub import resolve_base
from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.cli.chat import chat
from paddlenlp_ext.cli.device import choose_device_or_cpu
from paddlenlp_ext.cli.incomplete_file import IncompleteFile, digest, files_state
from paddlenlp_ext.cli.predict_arguments import NO_VALUE, LoadArguments, ModelArguments, PredictorArguments
from paddlenlp_ext.cli.predict_file import PredictionRow, check_output_file, predict_file
from paddlenlp_ext.data.prediction_prompts import Prompt, encode_truncated_prompt, read_prompts
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.base import ChatTemplate, TemplateOptions
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.ops.cpu import bf16
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.peft.save_and_load import AdapterFiles, read_adapter
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantization_report, quantize_linears
from paddlenlp_ext.static_graph.static_model import StaticModel
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger("paddlenlp_ext.predict")


def predict(arguments: PredictorArguments) -> None:
    """Answer the rows of `arguments.data_file`, or chat in the terminal if there is none.

    Raises:
        ValueError: a model, adapter, template or file cannot be used; rows are read before the model is loaded.
    """
    if arguments.data_file is not None:
        check_output_file(arguments.output_file, arguments.data_file)
    base, adapter = find_model_and_adapter(arguments)
    questions = None if arguments.data_file is None else read_prompts(arguments.data_file)
    tokenizer = AutoTokenizer.from_pretrained(adapter if adapter and has_tokenizer(adapter) else base)
    template = choose_template(arguments, [adapter, base], tokenizer)
    rows: list[PredictionRow] = []
    inputs: dict[str, Any] = {}
    if questions is not None:
        rows = prediction_rows(arguments, questions, template)
        inputs = run_inputs(arguments, base, adapter, rows)
        IncompleteFile(arguments.output_file, inputs).check()
    model = load_model(arguments, base, adapter)
    model.add_eos_token_ids({*template.stop_token_ids, tokenizer.eos_token_id} - {None})
    options = {**arguments.decoding_options(), "eos_token_id": model.eos_token_ids}

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    if questions is not None:
        options |= {"batch_size": arguments.batch_size, "inputs": inputs}
        predict_file(model, rows, decode, arguments.output_file, **options)
        logger.info("answers written to %s", arguments.output_file)
        return

    def encode_prompt(question: str, history: Sequence[tuple[str, str]]) -> list[int]:
        prompt = Prompt(Conversation.asking(question, history, arguments.system), None)
        ids, was_truncated = encode_truncated_prompt(template, prompt, arguments.src_length)
        if was_truncated:
            logger.warning("the oldest turns, or the end of the message, exceed --src_length and are left out")
        return ids

    chat(model, encode_prompt, decode, **options)


def find_model_and_adapter(arguments: LoadArguments) -> tuple[str, str | None]:
    """Return the name of the base model, and the folder of the adapter or None.

    `model_name_or_path` may be an adapter folder. Its base is named in its adapter_config.json, else in the
    run_config.json next to it.

    Raises:
        ValueError: the adapter names no base, the base cannot be found, or there are two adapters.
    """
    named = Path(arguments.model_name_or_path).expanduser()
    if not (named / "adapter_config.json").is_file() or (named / "config.json").is_file():
        if (named / "adapter_config.json").is_file() and not arguments.adapter_path:
            logger.warning("%s holds a model and an adapter: using the model only; --lora_path adds the adapter", named)
        return arguments.model_name_or_path, arguments.adapter_path
    if arguments.adapter_path:
        raise ValueError(
            f"--model_name_or_path {named} is itself an adapter, and --lora_path names another; pass the base model"
        )
    for file, key in (("adapter_config.json", "base_model_name_or_path"), ("run_config.json", "model_name_or_path")):
        base = read_json_object(named / file).get(key) if (named / file).is_file() else None
        if base:
            resolve_base(base, named, f"--model_name_or_path BASE --lora_path {named}")
            return base, str(named)
    raise ValueError(f"{named} does not name its base model; pass --model_name_or_path BASE --lora_path {named}")


def has_tokenizer(folder: str) -> bool:
    """Return whether a run saved its tokenizer next to its adapter."""
    return (Path(folder).expanduser() / "tokenizer_config.json").is_file()


def choose_template(
    arguments: ModelArguments, folders: Sequence[str | None], tokenizer: PreTrainedTokenizerBase
) -> ChatTemplate:
    """Load the requested chat template, else the one of the training run, else the tokenizer's own.

    The variables of the training run belong to its template: a requested one has those of the command line only.

    Args:
        arguments: `--chat_template` and `--chat_template_kwargs`.
        folders: folders that may hold the run_config.json of the training run; the first file found counts.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: the template file of the training run no longer exists, or the template lacks a variable.
    """
    runs = [Path(folder).expanduser() / "run_config.json" for folder in folders if folder is not None]
    run = next((path for path in runs if path.is_file()), None)
    settings = {} if run is None else read_json_object(run)
    kwargs = arguments.chat_template_kwargs or {}
    if arguments.chat_template is None and arguments.chat_template_kwargs is None:
        kwargs = settings.get("chat_template_kwargs") or {}
    options = TemplateOptions(kwargs)
    if kwargs:
        logger.info("chat_template_kwargs: %s", json.dumps(kwargs, ensure_ascii=False))
    if arguments.chat_template is not None or run is None:
        logger.info("chat template: %s", arguments.chat_template or "the tokenizer's own (no run_config.json found)")
        return load_template(arguments.chat_template, tokenizer, options)
    key = "autoregressive" if settings.get("autoregressive") else "chat_template"
    option = "none" if key == "autoregressive" else settings.get(key)
    if option not in (None, "none") and not Path(option).expanduser().exists():
        raise ValueError(f"{run}: the {key} of the training run, {option}, no longer exists; pass --chat_template FILE")
    logger.info("chat template: %s, as in training (%s in %s)", option or "the tokenizer's own", key, run)
    return load_template(option, tokenizer, options)


def prediction_rows(
    arguments: PredictorArguments, questions: Sequence[Prompt], template: ChatTemplate
) -> list[PredictionRow]:
    """Return the rows of a data file with the ids of their prompts; rows without a system prompt get `--system`.

    Raises:
        ValueError: see `encode_prompts`.
    """
    if arguments.system is not None:
        questions = [question.with_system(arguments.system) for question in questions]
    prompts = encode_prompts(template, questions, arguments.src_length)
    return [PredictionRow(ids, each.src, each.tgt) for ids, each in zip(prompts, questions, strict=True)]


def encode_prompts(template: ChatTemplate, questions: Sequence[Prompt], src_length: int) -> list[list[int]]:
    """Return the prompt ids of every question; log how many prompts were truncated to `src_length` tokens.

    Raises:
        ValueError: the template does not write a row, or its text alone exceeds `src_length`.
    """
    encoded = []
    for number, question in enumerate(questions, start=1):
        try:
            encoded.append(encode_truncated_prompt(template, question, src_length))
        except InvalidRowError as error:
            raise ValueError(f"data_file: row {number}: {error}") from error
    num_truncated = sum(was_truncated for _, was_truncated in encoded)
    if num_truncated:
        logger.warning(
            "%d of %d prompts were truncated to --src_length %d tokens", num_truncated, len(encoded), src_length
        )
    return [ids for ids, _ in encoded]


def load_model(arguments: PredictorArguments, base: str, adapter: str | None) -> Any:
    """Load the model, with the adapter merged into its weights if the method and the base allow it.

    Raises:
        ValueError: see `load_unmerged`, `quantize` and `StaticModel`; or prompt and answer may exceed the model's
            context.
    """

    def check(config: Mapping[str, Any]) -> None:
        check_context(arguments, config)

    if arguments.mode == "static":
        exported = load_static(arguments, base)
        check(exported.config.source)
        return exported
    model = load_unmerged(arguments, base, adapter, check)
    model = model.merge_and_unload() if can_merge(model) else model
    quantize(model, arguments.quant_type)
    return model


def load_static(arguments: PredictorArguments, folder: str) -> StaticModel:
    """Load an exported model.

    Raises:
        ValueError: see `StaticModel`; or `dtype` or `quant_type` is requested and not that of the export.
    """
    choose_device_or_cpu(arguments.device or "auto")
    model = StaticModel(ModelSource.resolve(folder).path, arguments.model_prefix)
    exported = {"dtype": model.dtype_name, "quant_type": model.quant_type or ""}
    for name, value in exported.items():
        requested = getattr(arguments, name)
        if requested is not None and ("" if requested in NO_VALUE else requested) != value:
            raise ValueError(
                f"--{name} {requested or repr('')}: {folder} was exported with {value or 'none'}; leave it out"
            )
    return model


def quantize(model: Any, quant_type: str | None) -> None:
    """Quantize the linear layers of a loaded model to the format of `--quant_type`, if it names one.

    Raises:
        ValueError: the model is already quantized, or has an adapter that does not merge.
    """
    if quant_type not in ("weight_only_int8", "weight_only_int4"):
        return
    if isinstance(model, PeftModel):
        raise ValueError(f"--quant_type {quant_type}: the adapter is not merged into the weights; leave it out")
    quantize_linears(model, QuantizationConfig(algo=quant_type))


def load_unmerged(
    arguments: LoadArguments,
    base: str,
    adapter: str | None,
    check_config: Callable[[Mapping[str, Any]], None] | None = None,
) -> Any:
    """Load the model, and the adapter as layers of its own.

    A base that was quantized during training is quantized in the same way, unless it is stored quantized.

    Args:
        arguments: device, dtype and attention of the model.
        base: name of the base model.
        adapter: folder of the adapter, or None.
        check_config: called with the content of config.json before the weights are read.

    Raises:
        ValueError: the device is unknown or does not support the dtype, or a file cannot be used.
    """
    choose_device_or_cpu(arguments.device or "auto")
    dtype = choose_dtype(arguments.dtype, paddle.get_device())
    source, stored, options = find_source(base, adapter)
    if check_config is not None:
        check_config(source.config)
    options |= {"dtype": dtype, "use_flash_attention": arguments.use_flash_attention}
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    if model.quantization is not None:
        logger.info("%s", quantization_report(model))
    return model if stored is None else PeftModel.from_files(model, stored)


def can_merge(model: Any) -> bool:
    """Return whether a model has an adapter that merges; merging would expand a quantized base to its full size."""
    return isinstance(model, PeftModel) and model.peft_config.mergeable and model.quantization is None


def find_source(base: str, adapter: str | None) -> tuple[ModelSource, AdapterFiles | None, dict[str, Any]]:
    """Return the base model as it was trained over, its stored adapter, and the options to load the base with.

    Raises:
        ValueError: a model or adapter is not found, or the base is stored in another quantized format than in training.
    """
    source = ModelSource.resolve(base)
    if adapter is None:
        return source, None, {}
    stored = read_adapter(adapter)
    source = replace(source, config_overrides=stored.base_overrides(source.config))
    quantization = stored.base_quantization(source.config)
    return source, stored, {"quantization_config": quantization, "before_quantizing": stored.before_quantizing}


def choose_dtype(requested: str | None, device: str) -> str:
    """Return the dtype of the weights: the requested one, else float32 on the CPU and bfloat16 elsewhere.

    The CPU computes float16 models in bfloat16, or in float32 if it has no bfloat16 arithmetic; a warning says so.

    Raises:
        ValueError: bfloat16 was requested, and this CPU cannot multiply in it.
    """
    if device != "cpu":
        return requested or "bfloat16"
    if requested == "float16":
        dtype = "float32" if bf16.unavailable_reason() is not None else "bfloat16"
        logger.warning("--dtype float16 is not available on the CPU, using %s", dtype)
        return dtype
    if requested == "bfloat16" and bf16.unavailable_reason() is not None:
        raise ValueError(f"--dtype bfloat16 is not available on this CPU: {bf16.unavailable_reason()}; use float32")
    return requested or "float32"


def check_context(arguments: PredictorArguments, config: Mapping[str, Any]) -> None:
    """Check the requested lengths against the model's context, as its rope scaling extends it.

    Raises:
        ValueError: prompt and answer together may exceed the context.
    """
    if config.get("max_position_embeddings") is None:
        return
    longest = DecoderConfig.from_dict(config).max_context
    total = arguments.src_length + arguments.max_length
    if total > longest:
        raise ValueError(
            f"--src_length {arguments.src_length} and --max_length {arguments.max_length} make {total} tokens, more "
            f"than the model's context of {longest} (max_position_embeddings, scaled); lower one of them"
        )


def run_inputs(
    arguments: PredictorArguments, base: str, adapter: str | None, rows: Sequence[PredictionRow]
) -> dict[str, Any]:
    """Return the inputs that the output file depends on; an interrupted run continues if they are equal.

    Files of models are compared by name, size and time of change.
    """
    folders = [ModelSource.resolve(base).path] + ([] if adapter is None else [Path(adapter).expanduser()])
    return {
        "model_name_or_path": str(folders[0]),
        "lora_path": None if adapter is None else str(folders[1].resolve()),
        "files of the model": [files_state(folder) for folder in folders],
        "dtype": arguments.dtype,
        "mode": arguments.mode,
        "model_prefix": arguments.model_prefix,
        "quant_type": arguments.quant_type,
        "data_file, template or src_length": digest([[[*row.prompt_ids], row.src, row.tgt] for row in rows]),
        **arguments.decoding_options(),
    }
