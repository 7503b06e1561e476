"""Predicted against measured peak memory of a training step, for full training, LoRA and LoRA over quantized weights.

    python benchmarks/memory.py [OUT.md] [--model smollm2-135m-instruct]

The prediction is the dry run's (train/memory.py), the measurement that of a process of its own (train_step.py). OUT.md
gets the tables: predicted and measured peak, and the prediction by part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import paddle

from measure import SMOLLM2_SHAPE, environment
from paddlenlp_ext import LoRAConfig, get_peft_model
from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.quant.model import NOTHING_PACKED, packed_size
from paddlenlp_ext.quant.options import QuantOptions
from paddlenlp_ext.train.memory import MemoryEstimate, estimate_memory
from paddlenlp_ext.utils.cli import run_command

CASES = [
    # documents, length, method, recompute
    (2, 256, "lora", False),
    (8, 128, "lora", False),
    (4, 512, "lora", False),
    (4, 512, "lora", True),
    (1, 2048, "lora", False),
    (2, 256, "full", False),
    (4, 512, "full", False),
    (4, 512, "full", True),
    (2, 256, "weight_only_int8", False),
    (2, 256, "weight_only_int4", False),
    (2, 256, "fp4", False),
    (2, 256, "nf4", False),
    (2, 256, "nf4 double", False),
    (4, 512, "nf4 double", False),
    (4, 512, "nf4 double", True),
]


def options_of(method: str) -> QuantOptions | None:
    """How the base is quantized; None for full training and plain LoRA."""
    algo, _, double = method.partition(" ")
    return None if algo in ("lora", "full") else QuantOptions(algo=algo, double_quant=bool(double))


def measure(model: str, documents: int, length: int, method: str, recompute: bool) -> float:
    """GB at the peak of a process that loads the model and makes two steps."""
    options = options_of(method)
    script = Path(__file__).with_name("train_step.py")
    keys = [
        "--model_name_or_path",
        model,
        "--lora",
        str(method != "full").lower(),
        "--recompute",
        str(recompute).lower(),
    ]
    if options is not None:
        keys += ["--weight_quantize_algo", options.algo, "--weight_double_quant", str(options.double_quant).lower()]
    command = [sys.executable, script, "--documents", documents, "--length", length, "--steps", 1, *keys]
    output = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])["peak_memory_gb"]


def predict(documents: int, length: int, method: str, recompute: bool) -> MemoryEstimate:
    """What the dry run would name."""
    options = options_of(method)
    with paddle.LazyGuard():
        model = CausalLM(DecoderConfig.from_dict(SMOLLM2_SHAPE))
        packed = NOTHING_PACKED if options is None else packed_size(model, options)
        model = model if method == "full" else get_peft_model(model, LoRAConfig(rank=8))
    tokens = documents * length
    plan = RecomputePlan() if recompute else None
    return estimate_memory(model, micro_batch_tokens=tokens, learned_tokens=tokens, recompute=plan, packed=packed)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a model of SmolLM2-135M's shape")
    args = parser.parse_args(argv)
    parts = [part.name for part in fields(MemoryEstimate)]
    lines = [
        "| documents | method | recompute | predicted GB | measured GB | error |",
        "|---|---|---|---|---|---|",
    ]
    by_part = [f"| documents | method | recompute | {' | '.join(parts)} |", "|---" * (3 + len(parts)) + "|"]
    print(*lines, sep="\n")
    for documents, length, method, recompute in CASES:
        estimate = predict(documents, length, method, recompute)
        predicted, measured = estimate.total / 1e9, measure(args.model, documents, length, method, recompute)
        case = f"| {documents} x {length} | {method} | {'yes' if recompute else 'no'} |"
        lines.append(f"{case} {predicted:.2f} | {measured:.2f} | {predicted / measured - 1:+.0%} |")
        by_part.append(f"{case} {' | '.join(f'{getattr(estimate, part) / 1e9:.2f}' for part in parts)} |")
        print(lines[-1], flush=True)
    source = json.dumps(environment("paddlepaddle"))
    print(*by_part, source, sep="\n")
    if args.out is not None:
        page = ["# Peak memory of a training step", "", *lines, "", "The prediction by part, GB:", "", *by_part]
        args.out.write_text("\n".join([*page, "", source, ""]), encoding="utf-8")


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
