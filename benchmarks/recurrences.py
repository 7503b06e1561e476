"""Time of the recurrences of gated delta nets, Kimi delta attention and Mamba-2, in C++ and in plain Paddle.

    python -m benchmarks.recurrences [--ops NAME ... --tokens 2048 --rows 1 8 --seconds 1 --dtype float32]

The first rows of the table are a forward pass without gradients, and a forward and backward pass, on one document. The
last rows are decoding steps of one token for each row of a batch. The two programs alternate in turns of `--seconds`.
Each time is the median over all calls in the turns of a program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from benchmarks.measure import environment
from benchmarks.triton_table import markdown
from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule import gated_delta_rule_op
from paddlenlp_ext.ops.kimi_delta_rule import kimi_delta_rule_op
from paddlenlp_ext.ops.state_space_duality import state_space_duality_op
from paddlenlp_ext.utils.run_command import run_command

OPS = {
    "gated delta rule": gated_delta_rule_op,
    "Kimi delta rule": kimi_delta_rule_op,
    "state space duality": state_space_duality_op,
}
SHAPES = {
    "gated delta rule": (16, 16, 128, 128),
    "Kimi delta rule": (32, 32, 128, 128),
    "state space duality": (1, 48, 128, 64),
}
"""Key heads (or groups), heads, rows and columns of a state in Qwen3.5-0.8B, in Kimi-Linear-48B-A3B, and in Granite 4 H
350M to Micro."""
BACKENDS = ("cpp", "reference")
ROUNDS = 3


def random_tensors(name: str, layout: AttentionLayout, dtype: str) -> list[paddle.Tensor]:
    """Return random inputs of an op, with initial states."""
    groups, heads, key_dim, value_dim = SHAPES[name]
    count, rng = layout.num_positions, np.random.default_rng(0)
    shapes = [[count, groups, key_dim], [count, groups, key_dim], [count, heads, value_dim]]
    tensors = [paddle.to_tensor(rng.standard_normal(shape, np.float32), getattr(paddle, dtype)) for shape in shapes]
    channels = [key_dim] if name == "Kimi delta rule" else []
    tensors.append(paddle.to_tensor(-(10 ** rng.uniform(-4, 0, (count, heads, *channels))), "float32"))
    if name != "state space duality":
        tensors.append(paddle.to_tensor(rng.uniform(0, 1, (count, heads)), "float32"))
    states = [len(layout.documents()[0]), heads, key_dim, value_dim]
    return [*tensors, paddle.to_tensor(rng.standard_normal(states, np.float32))]


def forward(name: str, backend: str, layout: AttentionLayout, dtype: str) -> Callable[[], object]:
    """Return a function that runs a forward pass without gradients; C++ overwrites the initial states."""
    *tensors, initial = random_tensors(name, layout, dtype)
    op = OPS[name].choose(tensors[2], backend)
    return lambda: op(*tensors, layout, initial, overwrites=True)


def both_passes(name: str, backend: str, layout: AttentionLayout, dtype: str) -> Callable[[], object]:
    """Return a function that runs a forward and a backward pass."""
    *tensors, initial = random_tensors(name, layout, dtype)
    op = OPS[name].choose(tensors[2], backend)
    for tensor in tensors:
        tensor.stop_gradient = False
    gradient = paddle.ones(tensors[2].shape, tensors[2].dtype)

    def run() -> None:
        outputs, _ = op(*tensors, layout, initial)
        outputs.backward(gradient)
        for tensor in tensors:
            tensor.clear_gradient(set_to_zero=False)

    return run


def milliseconds(programs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Return the median time of a call of each program, in milliseconds; a turn takes `seconds` or one call."""
    times: list[list[float]] = [[] for _ in programs]
    for program in programs:
        program()
    for _ in range(ROUNDS):
        for program, own in zip(programs, times, strict=True):
            end = time.perf_counter() + seconds
            while True:
                start = time.perf_counter()
                program()
                own.append(1e3 * (time.perf_counter() - start))
                if time.perf_counter() > end:
                    break
    return [statistics.median(own) for own in times]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", choices=OPS, nargs="+", default=[*OPS], help="recurrences")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the document")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="rows of the decoding steps")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args(argv)
    document = AttentionLayout.from_documents([[args.tokens]])
    table: dict[str, list[object]] = {}
    for name in args.ops:
        cases = {f"{args.tokens} tokens, forward": (forward, document)}
        cases[f"{args.tokens} tokens, forward and backward"] = both_passes, document
        for rows in args.rows:
            cases[f"decoding step, {rows} rows"] = forward, AttentionLayout.from_documents([[1]] * rows)
        for case, (make, layout) in cases.items():
            programs = [make(name, backend, layout, args.dtype) for backend in BACKENDS]
            cpp, reference = milliseconds(programs, args.seconds)
            table[f"{name}, {case}"] = [f"{cpp:.3f}", f"{reference:.3f}", f"{reference / cpp:.1f}"]
    print(markdown(["C++, ms", "plain Paddle, ms", "ratio"], table, "case"))
    print(json.dumps({"dtype": args.dtype, "shapes": SHAPES, **environment("paddlepaddle")}))


if __name__ == "__main__":
    run_command(main)
