"""Programs that merge an adapter into its base model, such as llm/merge_lora_params.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Literal, cast

from paddlenlp_ext._runtime import require_paddle
from paddlenlp_ext.cli.next_steps import next_steps
from paddlenlp_ext.config.command_line import parse_arguments
from paddlenlp_ext.config.dataclass_options import OptionGroup, option, options_of
from paddlenlp_ext.config.paddlenlp_keys import CompatKey
from paddlenlp_ext.utils.logging import get_logger

_COMPAT = (
    CompatKey("low_gpu_mem", (False,), "tensors are always merged one at a time", bool, "no effect"),
    CompatKey(
        "safe_serialization",
        (True,),
        "weights are written only as safetensors, because reading a pickle can run code; leave the argument out, "
        "because Paddle and transformers read safetensors",
        bool,
        "not here",
    ),
)


@dataclass(frozen=True, kw_only=True)
class MergeArguments(OptionGroup):
    """Arguments of the programs that merge an adapter."""

    adapter_path: str | None = option(
        None,
        aliases=("adapter",),
        help="adapter folder (written by this library, PEFT or PaddleNLP); unset: the base model is copied",
    )
    output_path: str = option(MISSING, aliases=("out",), help="folder of the merged model")
    model_name_or_path: str | None = option(
        None, aliases=("model",), help="base model; unset: the base model that the adapter names"
    )
    device: str = option(
        "auto", help="device for the comparison of logits: auto, cpu, gpu, ...; without a GPU, always cpu"
    )
    dtype: str | None = option(
        None, choices=("float32", "float16", "bfloat16"), help="dtype of the merged model; unset: dtype of the base"
    )
    merge_into: str = option(
        "dequantized",
        choices=("dequantized", "original"),
        aliases=("merge_base",),
        help="if the base was quantized in training: merge into the dequantized or the original weights",
    )
    overwrite: bool = option(False, help="replace a model at the output path")
    allow_pickle: bool = option(
        False,
        help="read .pdparams or adapter_model.bin if there are no safetensors files; only arrays are accepted",
    )


def merge_arguments(
    argv: Sequence[str],
    description: str | None,
    adapter_argument: str,
    output_aliases: Sequence[str] = (),
    usage: str | None = None,
) -> MergeArguments:
    """Parse the command line of a program that merges an adapter.

    Args:
        argv: the command line.
        description: docstring of the script; the help text shows the part before the first colon.
        adapter_argument: name of the argument for the adapter folder, such as "--lora_path".
        output_aliases: other spellings of `--output_path`, from PaddleNLP's documentation.
        usage: first lines of the help text; None: the script's name and `description`.

    Raises:
        ConfigError: arguments are unknown, missing or invalid; the message lists all problems.
        ValueError: neither an adapter nor a base model is given.
    """
    options = {entry.attribute: entry for entry in options_of(MergeArguments, "arguments")}
    options["adapter_path"] = replace(options["adapter_path"], key=adapter_argument.removeprefix("--"))
    aliases = tuple(alias.removeprefix("--") for alias in output_aliases)
    options["output_path"] = replace(options["output_path"], aliases=(*options["output_path"].aliases, *aliases))
    program = f"merge_{adapter_argument.removeprefix('--').removesuffix('_path')}_params.py"
    summary = (description or "").partition(":")[0]
    usage = usage or f"{program} {adapter_argument} ADAPTER --output_path MERGED [--key value ...]\n\n{summary}."
    values, notes = parse_arguments(argv, options.values(), usage, _COMPAT)
    for note in notes:
        get_logger().info("%s", note)
    if values.get("adapter_path") is None and values.get("model_name_or_path") is None:
        raise ValueError(f"nothing to merge: pass {adapter_argument} ADAPTER")
    return MergeArguments(**values)


def run_merge(arguments: MergeArguments) -> str:
    """Merge the adapter and compare logits, or copy the base if there is no adapter; return a summary.

    The summary of a merge ends with commands that use the merged model.

    Args:
        arguments: result of `merge_arguments`.

    Raises:
        ValueError: the device, adapter, base model or output folder cannot be used; no partial output is left behind.
    """
    require_paddle()
    from paddlenlp_ext.inference.device_and_dtype import choose_device_or_cpu
    from paddlenlp_ext.models.auto import load_for_task
    from paddlenlp_ext.peft.merge.copy_model import copy_model
    from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter

    choose_device_or_cpu(arguments.device)
    if arguments.adapter_path is None:
        assert arguments.model_name_or_path is not None, "checked by merge_arguments"
        output = copy_model(
            arguments.model_name_or_path, arguments.output_path, dtype=arguments.dtype, overwrite=arguments.overwrite
        )
        return f"{output}: copy of {arguments.model_name_or_path}; no adapter was given, so nothing was merged"
    report = merge_adapter(
        arguments.adapter_path,
        arguments.output_path,
        load_for_task,
        base=arguments.model_name_or_path,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        allow_pickle=arguments.allow_pickle,
        merge_base=cast("Literal['dequantized', 'original']", arguments.merge_into),
    )
    return (
        f"{report.output}: {report.num_merged} layers merged into {report.merged_into}. On fixed prompts, the adapter "
        f"changes logits by up to {report.effect:.3g}, and merging by up to {report.difference:.3g}.\n"
        + next_steps(report.output, "model")
    )
