"""What the commands that fold an adapter into its base have in common: their arguments, and doing what they say."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddle import nn


def merge_arguments(
    argv: Sequence[str], description: str | None, adapter_argument: str, output_aliases: Sequence[str] = ()
) -> argparse.Namespace:
    """Read the command line of a merge command; Paddle is not loaded for it.

    Args:
        argv: the command line.
        description: what `--help` says first.
        adapter_argument: how the adapter's folder is given, such as "--lora_path".
        output_aliases: other spellings of `--output_path`, as PaddleNLP's documents have them.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--model_name_or_path", help="base model; unset: the one that the adapter names")
    parser.add_argument(
        adapter_argument,
        dest="adapter_path",
        required=True,
        help="adapter folder (written here, by PEFT or by PaddleNLP)",
    )
    parser.add_argument(
        "--output_path", *output_aliases, dest="output_path", required=True, help="folder of the merged model"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, gpu, ...: where the logits are compared")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="unset: the base's own")
    parser.add_argument(
        "--merge_base",
        choices=("dequantized", "original"),
        default="dequantized",
        help="over a quantized base: merge into the weights that were trained against, or into the original ones",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model at the output path")
    parser.add_argument(
        "--safe_serialization", nargs="?", const="true", default="true", help="true; pickles are not written"
    )
    parser.add_argument(
        "--allow_pickle",
        action="store_true",
        help="take PaddleNLP's .pdparams where there are no safetensors; what is no array in it is refused",
    )
    parser.add_argument(
        "--low_gpu_mem", nargs="?", const="true", help="taken and without effect: tensors are merged one at a time"
    )
    arguments = parser.parse_args(argv)
    if arguments.safe_serialization.lower() not in ("true", "1", "yes"):
        parser.error("--safe_serialization False: pickled weights are not written; leave the argument out.")
    return arguments


def run_merge(arguments: argparse.Namespace, load_model: Callable[..., nn.Layer]) -> str:
    """Merge, check, and return one line that says what came out.

    Args:
        arguments: of `merge_arguments`.
        load_model: as `merge_adapter`'s.

    Raises:
        ValueError: as `choose_device` and `merge_adapter`; nothing is left at the output then.
    """
    from paddlenlp_ext.peft.merge.files import choose_device, merge_adapter

    choose_device(arguments.device)
    report = merge_adapter(
        arguments.adapter_path,
        arguments.output_path,
        load_model,
        base=arguments.model_name_or_path,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        allow_pickle=arguments.allow_pickle,
        merge_base=arguments.merge_base,
    )
    return (
        f"{report.output}: {report.num_merged} layers merged into {report.merged_into}. On fixed prompts the adapter "
        f"changes logits by up to {report.effect:.3g}; merged and unmerged differ by {report.difference:.3g}."
    )
