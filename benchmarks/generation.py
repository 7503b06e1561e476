"""Tokens per second of greedy decoding: random prompts of one length; every row reaches the maximum length.

    python -m benchmarks.generation [--batch 1 --prompt 64 --new 128 --steps 5 --dtype float32|bfloat16]

A step is one call of `generate`, including the forward pass of the prompt. Only new tokens are counted. The peer's
script is benchmarks/peers/generation.py, for transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks.measure import random_documents, report, time_steps
from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.utils.run_command import run_command

MODEL = "smollm2-135m-instruct"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="number of timed calls, after an untimed call")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args(argv)

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=args.dtype)
    prompts = random_documents(args.batch, args.prompt).tolist()

    def step() -> None:
        rows = model.generate(prompts, max_new_tokens=args.new, eos_token_id=None, batch_size=args.batch)
        assert [len(row) for row in rows] == [args.new] * args.batch

    figures = time_steps(step, args.steps, args.batch * args.new)
    report("generation", {**vars(args), **figures}, "paddlepaddle")


if __name__ == "__main__":
    run_command(main)
