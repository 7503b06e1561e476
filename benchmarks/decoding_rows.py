"""Decoding steps of many rows on the CPU: one C++ call for all rows, one call per 16 rows, and separate ops.

    python -m benchmarks.decoding_rows [--model smollm2-135m-instruct --rows 8 17 24 32 64 --formats fp32 bf16 nf4
        --prompt 64]

The three variants run in turn in one process. Each repetition has `--steps` steps. The script prints tokens/s of the
median step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from benchmarks.measure import random_documents, report
from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.generation.continuous_kv_cache import SlotCache
from paddlenlp_ext.generation.prefill_and_decode import forward, step
from paddlenlp_ext.models import causal_lm, decoder
from paddlenlp_ext.quantization.config import QuantizationConfig

CHUNK = 16
FORMATS = {"fp32": ("float32", None), "bf16": ("bfloat16", None), "nf4": ("bfloat16", "nf4")}
"""Format -> dtype of the model, and its quantization."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 17, 24, 32, 64])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found = {}
    for name in options.formats:
        dtype, algo = FORMATS[name]
        quantization = None if algo is None else QuantizationConfig(algo=algo)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, quantization_config=quantization)
        for rows in options.rows:
            found[f"{name}, {rows} rows"] = measure(model, rows, options)
            print(name, rows, found[f"{name}, {rows} rows"], flush=True)
    report("decoding_rows", found, "paddlepaddle")


@paddle.no_grad()
def measure(model: Any, rows: int, options: argparse.Namespace) -> dict[str, float]:
    """Return tokens/s of each variant."""
    caches = {name: filled(model, rows, options.prompt) for name in WAYS}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(1 + options.repeats):
        for name, run in WAYS.items():
            times = []
            for _ in range(options.steps):
                begin = time.perf_counter()
                run(model, caches[name], rows)
                times.append(time.perf_counter() - begin)
            seconds[name].append(statistics.median(times))
    return {name: round(rows / statistics.median(each[1:]), 1) for name, each in seconds.items()}


def filled(model: Any, rows: int, prompt: int) -> SlotCache:
    """Return a cache with the prompts of all rows."""
    cache = SlotCache()
    for _ in range(rows):
        cache.add_row()
    view = cache.rows(0, rows, [prompt] * rows)
    forward(model, random_documents(rows, prompt).tolist(), view)
    view.advance()
    return cache


def decode(model: Any, cache: SlotCache, first: int, rows: int) -> None:
    """Append a token to each of `rows` rows."""
    view = cache.rows(first, rows, [cache.lengths[first]] * rows)
    step(model, [[7]] * rows, view)
    view.advance()


def in_one_call(model: Any, cache: SlotCache, rows: int) -> None:
    decode(model, cache, 0, rows)


def in_chunks(model: Any, cache: SlotCache, rows: int) -> None:
    for first in range(0, rows, CHUNK):
        decode(model, cache, first, min(CHUNK, rows - first))


def op_by_op(model: Any, cache: SlotCache, rows: int) -> None:
    nothing = lambda *_: None  # noqa: E731
    with patch.object(causal_lm, "run_cpp_model", nothing), patch.object(decoder, "run_cpp_layers", nothing):
        decode(model, cache, 0, rows)


WAYS: dict[str, Callable[[Any, SlotCache, int], None]] = {
    "one call": in_one_call,
    "calls of 16 rows": in_chunks,
    "separate ops": op_by_op,
}

if __name__ == "__main__":
    main()
