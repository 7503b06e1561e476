"""Training step of a mixture-of-experts model with random weights, measured in turn with transformers on PyTorch.

    python -m benchmarks.experts [--rounds 3 --steps 3 --method full --dtype float32 --documents 4 --length 512]

The default shape has about one billion parameters: 8 experts, 2 of them per token. `--layers 2 --hidden 128 --inner
256` is a quick trial. The peer runs in .venv-peers (`make .venv-peers/installed`). Prints a JSON line per measurement,
and the ratio of the median speeds. A full fp32 step needs 20 GB of memory; `--method lora` adapts attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks import ROOT
from benchmarks.bench import run_module
from benchmarks.measure import SMOLLM2_SHAPE
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.utils.run_command import run_command

OURS = {"full": "", "lora": "--lora true --lora_rank 8", "float32": "", "bfloat16": "--bf16 true --fp16_opt_level O2"}
"""Keys of this project for each method and dtype."""


def write_model(folder: Path, args: argparse.Namespace) -> int:
    """Write a Mixtral of the given sizes; return its number of parameters."""
    shape = {
        "model_type": "mixtral",
        "vocab_size": SMOLLM2_SHAPE["vocab_size"],
        "hidden_size": args.hidden,
        "intermediate_size": args.inner,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": max(1, args.hidden // 256),
        "num_local_experts": args.experts,
        "num_experts_per_tok": args.active,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    model = AutoModelForCausalLM.from_config(shape)
    model.save_pretrained(folder)
    return sum(parameter.size for parameter in model.parameters())


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 1024), ("inner", 2752), ("layers", 14), ("experts", 8), ("active", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("documents", 4), ("length", 512), ("steps", 3), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--method", choices=["lora", "full"], default="full")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args(argv)

    sizes = f"--documents {args.documents} --length {args.length} --steps {args.steps}"
    rates: dict[str, list[float]] = {"ours": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        print(f"{write_model(Path(folder), args):,} parameters", flush=True)
        commands = {
            "ours": (
                sys.executable,
                f"train_step {sizes} --model_name_or_path {folder} {OURS[args.method]} {OURS[args.dtype]}",
            ),
            "transformers": (
                str(ROOT / ".venv-peers" / "bin" / "python"),
                f"peers.train_step {folder} {sizes} --method {args.method} --dtype {args.dtype}",
            ),
        }
        for _ in range(args.rounds):
            for name, (python, command) in commands.items():
                figures = run_module(python, command)
                rates[name].append(figures["tokens_per_second"])
                print(json.dumps({"program": name, **figures}), flush=True)
    ours, theirs = (statistics.median(rates[name]) for name in ("ours", "transformers"))
    print(f"{ours:.1f} and {theirs:.1f} tokens per second: {ours / theirs:.2f} times transformers")


if __name__ == "__main__":
    run_command(main)
