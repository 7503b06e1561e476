"""Speed of a model with gated delta nets compared with transformers: Qwen3.5-0.8B's shape, random weights.

    python -m benchmarks.hybrid [--rounds 3 --steps 1 --batches 1 8 --peers .venv-peers/bin/python]
    python -m benchmarks.hybrid --lengths 2048 8192 32768 65536      # cost by document length

The first form measures an optimizer step of LoRA r 8 on 4 documents of 512 tokens, and greedy decoding after prompts of
64 tokens, both in bf16. The programs take turns, each in a separate process; the table has medians over the rounds. For
4 documents, transformers needs 22 GB of memory. The second form measures forward and backward pass of one layer with a
gated delta net, on one document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from benchmarks import ROOT
from benchmarks.bench import run_module
from benchmarks.cases import BF16_KEYS
from benchmarks.decoding import prepare, run
from benchmarks.measure import SHAPES, environment, peak_memory_gb, random_documents, time_steps
from paddlenlp_ext import AutoModelForCausalLM, LoRAConfig, get_peft_model
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from paddlenlp_ext.utils.run_command import run_command

SHAPE = "qwen3.5-0.8b"
OURS, PEER = "this project", "transformers + peft"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="number of timed steps of each process")
    parser.add_argument("--documents", type=int, default=4, help="number of documents of an optimizer step")
    parser.add_argument("--only", nargs="+", choices=["train", "decode"], default=["train", "decode"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="batch sizes of decoding")
    parser.add_argument("--new", type=int, default=32, help="number of tokens that are decoded")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"), help="Python with transformers"
    )
    parser.add_argument("--lengths", nargs="+", type=int, help="lengths of the document, in tokens")
    args = parser.parse_args(argv)
    if args.lengths:
        print("| tokens | tokens/s | processor time, µs per token | peak memory, GB |", "|---|---|---|---|", sep="\n")
        for length in args.lengths:
            speed, microseconds = layer_speed(length, args.steps)
            print(f"| {length} | {speed:.0f} | {microseconds:.0f} | {peak_memory_gb():.2f} |", flush=True)
    else:
        compare(args)
    print(json.dumps(environment("paddlepaddle")))


def compare(args: argparse.Namespace) -> None:
    """Run both programs in turn on every case, and print the rate of each round and a table of medians."""
    folder = prepare(SHAPE, "folder")
    batches = args.batches if "decode" in args.only else []
    rates: dict[str, dict[str, list[float]]] = {}
    for number in range(args.rounds):
        measured = {f"decode, batch {batch}": decode(folder, batch, args) for batch in batches}
        if "train" in args.only:
            measured["LoRA step"] = train(folder, args)
        for case, rate in measured.items():
            print(f"round {number + 1}, {case}: {rate}", flush=True)
            for program, value in rate.items():
                rates.setdefault(case, {}).setdefault(program, []).append(value)
    print(f"| case | {OURS}, tokens/s | {PEER}, tokens/s | ratio |", "|---|---|---|---|", sep="\n")
    for case, by_program in rates.items():
        ours, peer = (statistics.median(by_program[program]) for program in (OURS, PEER))
        print(f"| {case} | {ours:.1f} | {peer:.1f} | {ours / peer:.2f} |")


def train(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return the tokens per second of an optimizer step in each program."""
    commands = {
        OURS: (sys.executable, f"train_step --model_name_or_path {folder} --lora true --lora_rank 8 {BF16_KEYS}"),
        PEER: (args.peers, f"peers.train_step {folder} --dtype bfloat16"),
    }
    return {
        program: run_module(python, f"{command} --documents {args.documents} --steps {args.steps}")["tokens_per_second"]
        for program, (python, command) in commands.items()
    }


def decode(folder: Path, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the tokens per second of decoding steps in each program."""
    case = {"model": str(folder), "format": "bf16", "batch": batch, "prompt": 64, "repeats": 1}
    case |= {"new": args.new, "threads": args.threads}
    commands = {
        OURS: [sys.executable, "-m", "benchmarks.decoding", "--worker"],
        PEER: [args.peers, "-m", "benchmarks.peers.decoding"],
    }
    return {program: round(batch / run(case, command)["step"], 2) for program, command in commands.items()}


def layer_speed(length: int, steps: int) -> tuple[float, float]:
    """Measure the forward and backward pass of one layer, with LoRA r 8 in bf16.

    Returns:
        The tokens per second, and the processor time of all threads in microseconds per token.
    """
    config = {**SHAPES[SHAPE], "num_hidden_layers": 1, "layer_types": ["linear_attention"], "vocab_size": 512}
    model = get_peft_model(AutoModelForCausalLM.from_config(config, dtype="bfloat16"), LoRAConfig(r=8))
    model.train()
    ids = paddle.to_tensor(random_documents(1, length, 512))
    gradient = paddle.to_tensor(np.random.default_rng(2).standard_normal((1, length, 1024), np.float32))

    def step() -> None:
        with bf16_matmuls():
            model.hidden_states(ids).backward(gradient)
        for parameter in model.parameters():
            parameter.clear_gradient(set_to_zero=False)

    step()  # builds the kernels' tables
    start = time.process_time()
    speed = float(str(time_steps(step, steps, length)["tokens_per_second"]))
    num_steps = steps + 1  # with the untimed step
    return speed, 1e6 * (time.process_time() - start) / (num_steps * length)


if __name__ == "__main__":
    run_command(main)
