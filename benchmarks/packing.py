"""Fill rate of packs, and time to plan the packs.

    python -m benchmarks.packing                                    random lengths of six distributions; a million rows
    python -m benchmarks.packing --data FOLDER --model NAME_OR_PATH  the rows of a dataset, with a model's tokenizer

Columns, as the fraction of positions that hold a token:
    padded       random batches of 8 rows, padded to the longest row of each batch
    in_order     next-fit, `zero_padding`
    worst_fit    a row goes to the emptiest open pack, groups of 500 rows (PaddleNLP's greedy packing)
    decreasing   best-fit decreasing over all rows at once
    greedy       `greedy_zero_padding` of this project
    bound        as many positions as tokens, rounded up to full packs: the maximum for any packing
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.packing import PackingPlan

SHAPES = {
    # name: mean and deviation of the logarithm, shortest, capacity
    "worked answers, 2048": (5.15, 0.35, 60, 2048),
    "instructions, 2048": (4.6, 0.7, 20, 2048),
    "chats, 4096": (6.2, 1.0, 20, 4096),
    "chats, 8192": (6.2, 1.1, 20, 8192),
    "reasoning, 8192": (8.0, 0.7, 200, 8192),
    "reasoning, 16384": (8.3, 0.8, 200, 16384),
}
BUFFER_ROWS = 500
PADDED_ROWS = 8


def main() -> None:
    """Print one table line for every kind of data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder or built-in name of a dataset; unset: random lengths")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model whose tokenizer is used")
    parser.add_argument("--max_length", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rows", type=int, default=20_000, help="number of rows with random lengths")
    options = parser.parse_args()
    print(f"{'':24}" + "".join(f"{name:>12}" for name in ("padded", *METHODS, "greedy", "bound", "greedy s")))
    if options.data:
        for capacity in options.max_length:
            print_line(f"{capacity}", dataset_lengths(options.data, options.model, capacity), capacity)
        return
    for name, (mean, deviation, shortest, capacity) in SHAPES.items():
        print_line(name, draw_lengths(mean, deviation, shortest, capacity, options.rows), capacity)
    lengths = draw_lengths(4.6, 0.7, 20, 2048, 1_000_000)
    plan, begin = PackingPlan(lengths, batch_size=1, packing="greedy", capacity=2048), time.perf_counter()
    packs = plan.packs(0)
    print(f"a million rows: {time.perf_counter() - begin:.2f} s, {lengths.sum() / len(packs) / 2048:.4%} full")


def print_line(name: str, lengths: np.ndarray, capacity: int) -> None:
    """Print the share of used positions of each packing algorithm for the same rows, and the seconds of planning."""
    order = np.random.default_rng(0).permutation(len(lengths))
    stream = lengths[order]
    total = int(lengths.sum())
    shares = [total / padded_positions(stream)]
    shares += [total / (count_packs(stream, capacity) * capacity) for count_packs in METHODS.values()]
    plan, begin = PackingPlan(lengths, batch_size=1, packing="greedy", capacity=capacity), time.perf_counter()
    num_packs = len(plan.packs(0))
    seconds = time.perf_counter() - begin
    shares += [total / (num_packs * capacity), total / (-(-total // capacity) * capacity)]
    print(f"{name:24}" + "".join(f"{share:>12.2%}" for share in shares) + f"{seconds:>12.3f}")


def draw_lengths(mean: float, deviation: float, shortest: int, capacity: int, count: int) -> np.ndarray:
    """Return log-normal lengths, truncated to the capacity of a pack."""
    drawn = np.random.default_rng(0).lognormal(mean, deviation, count)
    return np.clip(drawn, shortest, capacity).astype(np.int64)


def dataset_lengths(data: str, model: str, max_length: int) -> np.ndarray:
    """Return the positions that every training row of a dataset takes."""
    from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
    from paddlenlp_ext.data.dataset import load_dataset

    with tempfile.TemporaryDirectory() as cache:
        config = DataConfig(
            dataset_name_or_path=data, src_length=max_length // 2, max_length=max_length, data_cache_dir=cache
        )
        return load_dataset(config, "train", load_tokenizer(model)).lengths


def padded_positions(lengths: np.ndarray) -> int:
    """Return the number of positions in batches of consecutive rows, padded to the longest row of each batch."""
    batches = [lengths[start : start + PADDED_ROWS] for start in range(0, len(lengths), PADDED_ROWS)]
    return sum(int(batch.max()) * len(batch) for batch in batches)


def next_fit(lengths: np.ndarray, capacity: int) -> int:
    """Return the number of packs with `zero_padding`."""
    return len(PackingPlan(lengths, batch_size=1, packing="in_order", capacity=capacity, shuffle=False).packs(0))


def worst_fit(lengths: np.ndarray, capacity: int) -> int:
    """Return the number of packs if a row goes to the emptiest pack of its group, or a new pack if it does not fit."""
    count = 0
    for start in range(0, len(lengths), BUFFER_ROWS):
        rooms: list[int] = []
        for length in lengths[start : start + BUFFER_ROWS].tolist():
            emptiest = max(range(len(rooms)), key=rooms.__getitem__, default=-1)
            if emptiest < 0 or rooms[emptiest] < length:
                rooms.append(capacity - length)
            else:
                rooms[emptiest] -= length
        count += len(rooms)
    return count


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> int:
    """Return the number of packs if the longest remaining row goes to the fullest pack that has room for it."""
    rooms = [0] * (capacity + 1)  # number of open packs by remaining room
    occupied, count = 0, 0  # bit r of `occupied`: some pack has room r
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = occupied >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            rooms[room] -= 1
            occupied &= ~(0 if rooms[room] else 1 << room)
        else:
            room = capacity
            count += 1
        rooms[room - length] += 1
        occupied |= 1 << (room - length)
    return count


METHODS: dict[str, Callable[[np.ndarray, int], int]] = {
    "in_order": next_fit,
    "worst_fit": worst_fit,
    "decreasing": best_fit_decreasing,
}

if __name__ == "__main__":
    main()
