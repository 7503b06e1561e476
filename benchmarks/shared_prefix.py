"""Rows per second of SFT on random few-shot rows, with the shared prefix computed once per pack or once per row.

    python -m benchmarks.shared_prefix [--prefix 450 --own 75 --rows 400 --steps 5] [--key value ...]

Further keys are keys of llm/run_finetune.py, such as `--lora true --lora_rank 8`, `--bf16 true`, `--max_length 1024`. A
step trains a pack of at most `max_length` positions of random rows, which all share a prefix. Steps with and without
shared prefixes alternate in one process, after an untimed step of each. Rows have the same lengths in both. Processor
time is the sum over all threads; on a shared machine, it varies less than elapsed time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import numpy as np

from benchmarks.measure import SMOLLM2_SHAPE, report
from benchmarks.ours import run_config, training_step
from paddlenlp_ext.data.collate import PackedBatch, collate
from paddlenlp_ext.data.find_prefixes import find_prefixes
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.trainer.build_model import build_model
from paddlenlp_ext.utils.run_command import run_command

KEYS = ("--zero_padding", "true", "--greedy_zero_padding", "true", "--max_length", "2048")


def few_shot_rows(count: int, prefix: int, own: int) -> TokenArrays:
    """Return rows with a common prefix and remainders of 75 % to 125 % of `own` tokens, half of them target tokens."""
    generator, vocabulary = np.random.default_rng(0), SMOLLM2_SHAPE["vocab_size"]
    sizes = generator.integers(own * 3 // 4, own * 5 // 4 + 1, count)
    offsets = np.cumsum([0, *(prefix + sizes)])
    tokens = generator.integers(0, vocabulary, offsets[-1]).astype(np.int32)
    loss_mask = np.zeros(offsets[-1], bool)
    shots = generator.integers(0, vocabulary, prefix)
    for start, end, size in zip(offsets[:-1], offsets[1:], sizes, strict=True):
        tokens[start : start + prefix] = shots
        loss_mask[end - size // 2 : end] = True
    return TokenArrays(tokens, loss_mask, offsets, np.zeros((count, 3), np.int64), np.zeros((count, 2), np.int64))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=450, help="number of tokens of the prefix")
    parser.add_argument("--own", type=int, default=75, help="mean number of tokens of a row after the prefix")
    parser.add_argument("--rows", type=int, default=400, help="number of rows from which the packs are made")
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps of each kind")
    args, keys = parser.parse_known_args(argv)
    config = run_config([*KEYS, *keys])
    arrays = few_shot_rows(args.rows, args.prefix, args.own)
    rows = [arrays.row(index, index) for index in range(args.rows)]
    prefixes, capacity = find_prefixes([arrays], config.data.max_length), config.data.max_length
    shared_plan, plain_plan = (
        PackingPlan(arrays.lengths, batch_size=1, packing="greedy", capacity=capacity, prefixes=each)
        for each in (prefixes, None)
    )
    batches: dict[str, PackedBatch] = {
        "shared": collate([prefixes.join([rows[index] for index in shared_plan.packs(0)[0]])]),
        "unshared": collate([[rows[index] for index in plain_plan.packs(0)[0]]]),
    }
    built = build_model(ModelSource.from_config(config.model), config)
    steps = {name: training_step(built, config, batch) for name, batch in batches.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor_seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.steps + 1):
        for name, step in steps.items():
            begin = time.process_time()
            taken = step().seconds
            if number:
                seconds[name].append(taken)
                processor_seconds[name].append(time.process_time() - begin)
    figures = {
        name: {
            "rows": len(batch.row_indices),
            "positions": batch.num_tokens,
            "seconds": [round(each, 3) for each in seconds[name]],
            "processor_seconds": [round(each, 3) for each in processor_seconds[name]],
            "rows_per_second": round(len(batch.row_indices) / statistics.median(seconds[name]), 2),
            "rows_per_processor_second": round(len(batch.row_indices) / statistics.median(processor_seconds[name]), 2),
        }
        for name, batch in batches.items()
    }
    speedups = {
        key: round(figures["shared"][key] / figures["unshared"][key], 2)
        for key in ("rows_per_second", "rows_per_processor_second")
    }
    report("shared_prefix", {**vars(args), "keys": keys, **figures, "speedup": speedups}, "paddlepaddle")


if __name__ == "__main__":
    run_command(main)
