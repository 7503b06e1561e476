"""Options of benchmarks/grpo.py and benchmarks/peers/grpo.py; this module imports neither Paddle nor PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def parser_of_inputs(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the model and the rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("rows", type=Path, help="JSON Lines with src and tgt")
    return parser


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run."""
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps, after an untimed step")
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts in a step")
    parser.add_argument("--generations", type=int, default=8, help="number of completions of a prompt")
    parser.add_argument("--micro_batch", type=int, default=16, help="number of completions in a micro-batch")
    parser.add_argument("--length", type=int, default=40, help="maximum number of tokens in a completion")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-4)


def num_samples(args: argparse.Namespace) -> int:
    """Return the number of completions of a step."""
    return args.prompts * args.generations


def run_keys(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that have the same name in `GRPOConfig` of TRL and in the configuration of a run."""
    return {
        "num_generations": args.generations,
        "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": num_samples(args) // args.micro_batch,
        "max_completion_length": args.length,
        "max_steps": args.steps + 1,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
    }
