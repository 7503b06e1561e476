"""Fold a LoRA adapter into its base model: python llm/merge_lora_params.py --lora_path ADAPTER --output_path MERGED"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from paddlenlp_ext.utils.cli import run_command


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of PaddleNLP's script, in all spellings its documents use."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model_name_or_path", help="base model; unset: the one that the adapter names")
    parser.add_argument("--lora_path", required=True, help="adapter folder (written here, by PEFT or by PaddleNLP)")
    parser.add_argument(
        "--output_path",
        "--merge_lora_model_path",
        "--merge_model_path",
        dest="output_path",
        required=True,
        help="folder of the merged model",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, gpu, ...: where the logits are compared")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="unset: the base's own")
    parser.add_argument("--overwrite", action="store_true", help="replace a model at the output path")
    parser.add_argument(
        "--safe_serialization", nargs="?", const="true", default="true", help="true; pickles are not written"
    )
    parser.add_argument(
        "--low_gpu_mem", nargs="?", const="true", help="taken and without effect: tensors are merged one at a time"
    )
    arguments = parser.parse_args(argv)
    if arguments.safe_serialization.lower() not in ("true", "1", "yes"):
        parser.error("--safe_serialization False: pickled weights are not written; leave the argument out.")
    return arguments


def main(argv: Sequence[str]) -> None:
    """Merge, check, and say what came out."""
    arguments = parse_arguments(argv)
    from paddlenlp_ext import AutoModelForCausalLM
    from paddlenlp_ext.peft.merge import choose_device, merge_adapter

    choose_device(arguments.device)
    report = merge_adapter(
        arguments.lora_path,
        arguments.output_path,
        AutoModelForCausalLM.from_pretrained,
        base=arguments.model_name_or_path,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
    )
    print(
        f"{report.output}: {report.num_merged} layers merged. On fixed prompts the adapter changes logits by up to "
        f"{report.effect:.3g}; merged and unmerged differ by {report.difference:.3g}."
    )


if __name__ == "__main__":
    run_command(main)
