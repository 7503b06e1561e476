"""Time and memory of a training step with fused backends, and with plain Paddle in place of each group of ops.

    python -m benchmarks.fused_ops --lora true --lora_rank 16 --bf16 true >> LINES.jsonl            times of all groups
    python -m benchmarks.fused_ops --plain norms gates --seconds 30 --lora true >> LINES.jsonl      times of some groups
    python -m benchmarks.fused_ops --apart --lora true --lora_rank 16 --bf16 true >> LINES.jsonl    memory and losses
    python -m benchmarks.fused_ops --table LINES.jsonl

Fused backends are the C++ library on the CPU, and fused kernels in Triton and Paddle on a GPU (`--device gpu`, which
has not been run). Plain backends are the backends in ops/dispatch.py that consist of Paddle's own operators. Further
keys are keys of llm/run_finetune.py.

Without `--apart`, one process runs steps with each group in turn, after an untimed step with each group. A machine that
becomes slower therefore slows all groups. A group's time is divided by the time of the fused step in the same round.
`--table` combines lines with the same keys. With `--apart`, each group runs two steps in a separate process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from benchmarks.measure import peak_memory_gb, random_documents, report
from benchmarks.ours import packed_batch, run_config, training_step
from benchmarks.triton_table import markdown
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.ops.dispatch import DispatchedOp, dispatched_ops
from paddlenlp_ext.trainer.build_model import build_model
from paddlenlp_ext.trainer.trainer_state import StepReport
from paddlenlp_ext.utils.run_command import run_command

GROUPS: dict[str, tuple[str, ...]] = {
    "norms": ("rms_norm", "add_rms_norm"),
    "rotation": ("rope", "rotate_heads"),
    "gates": ("swiglu", "geglu", "clamped_swiglu"),
    "attention": ("attention", "attention with soft-cap, linear biases, sinks or wide heads"),
    "loss": ("linear_cross_entropy", "cross_entropy"),
    "lora": ("LoRA linear",),
    "lora and linears": (
        "LoRA linear",
        "linear",
        "quantized linear (nf4, fp4)",
        "quantized linear (int8, int4)",
        "quantized linear's gradient",
        "dequantize",
    ),
    "clipping": ("sum_of_squares", "scale"),
    "adamw": ("adamw",),
    "embedding": ("embedding",),
}
"""Names of the ops of each group. `lora` leaves the frozen products to their own fused ops."""

NOTHING, EVERYTHING = "nothing", "everything"
PLAIN_BACKENDS = ("blocks", "plain_cpu", "recomputed", "reference")
"""Backends that consist of Paddle's own operators."""

CASES = (NOTHING, *GROUPS, EVERYTHING)


def plain_backend(op: DispatchedOp) -> str:
    """Return the best plain backend of an op on the current device."""
    x = paddle.zeros([1])
    return next(name for name in op.backends if name in PLAIN_BACKENDS and op.unavailable_reason(name, x) is None)


@contextmanager
def in_plain_paddle(case: str) -> Iterator[None]:
    """Compute the ops of a group, or everything, in plain Paddle within the block.

    Raises:
        ValueError: the block uses none of these ops.
    """
    names = GROUPS.get(case, ())
    ops = [op for op in dispatched_ops() if case == EVERYTHING or op.name in names]
    with ExitStack() as restrictions:
        used = [restrictions.enter_context(op.restricted_to(plain_backend(op))) for op in ops]
        yield
    if ops and not any(each.chosen for each in used):
        raise ValueError(f"{case}: a step with these keys does not use {', '.join(names)}")


def time_in_turn(step: Callable[[str], object], cases: Sequence[str], seconds: float) -> dict[str, list[float]]:
    """Time steps of all cases in rounds, until the next step would end after `seconds`; return the times by case.

    The first round is not timed.
    """
    start = time.perf_counter()
    times: dict[str, list[float]] = {case: [] for case in cases}
    expected = dict.fromkeys(cases, 0.0)
    for index, case in enumerate(itertools.cycle(cases)):
        before = time.perf_counter()
        if before + expected[case] > start + seconds:
            break
        step(case)
        expected[case] = time.perf_counter() - before
        if index >= len(cases):
            times[case].append(round(expected[case], 4))
    return times


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the measurements of one set of keys, with a row for each case.

    The row of the fused step has its median time. Every other row has this time, multiplied by the median ratio of the
    case to the fused step of the same round.
    """
    seconds: list[float] = []
    ratios = defaultdict(list)
    memory, losses = {}, {}
    for line in lines:
        if "losses" in line:
            memory[line["case"]], losses[line["case"]] = line["peak_memory_gb"], line["losses"]
            continue
        fused = line["seconds"][NOTHING]
        seconds += fused
        for case, times in line["seconds"].items():
            ratios[case] += [own / other for own, other in zip(times, fused, strict=False)]
    rows: dict[str, list[object]] = {}
    for case in CASES:
        if ratios[case] and case in memory:
            ratio = statistics.median(ratios[case])
            step = ratio * statistics.median(seconds)
            rate = lines[0]["documents"] * lines[0]["length"] / step
            rows[case] = [
                len(ratios[case]),
                f"{step:.2f}",
                f"{ratio:.2f}",
                f"{rate:.0f}",
                f"{memory[case]:.2f}",
                f"{memory[case] - memory[NOTHING]:+.2f}",
                ", ".join(f"{loss:.3f}" for loss in losses[case]),
            ]
    heads = ["steps", "s per step", "time / fused", "tokens/s", "peak GB", "peak GB - fused", "losses"]
    return markdown(heads, rows, "replaced group")


def _measure(args: argparse.Namespace, keys: Sequence[str]) -> None:
    """Print the JSON lines of several cases, timed in turn, or, with `--apart`, the line of a single case."""
    config = run_config(keys)
    batch = packed_batch(random_documents(args.documents, args.length), 1.0)
    built = build_model(ModelSource.from_config(config.model), config)
    fused_step = training_step(built, config, batch)

    def step(case: str) -> StepReport:
        with in_plain_paddle(case):
            return fused_step()

    figures: dict[str, object] = {"documents": args.documents, "length": args.length, "keys": list(keys)}
    if args.apart:
        (case,) = args.plain
        figures |= {"case": case, "losses": [step(case).loss for _ in range(2)]}
    else:
        cases = [NOTHING, *(case for case in args.plain if case != NOTHING)]
        figures["seconds"] = time_in_turn(step, cases, args.seconds)
    on_gpu = paddle.get_device().startswith("gpu")
    peak = paddle.device.cuda.max_memory_allocated() / 1e9 if on_gpu else peak_memory_gb()
    report("fused_ops", figures, "paddlepaddle-gpu" if on_gpu else "paddlepaddle", peak_gb=peak)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", nargs="+", choices=CASES, default=list(CASES), help="groups to replace in turn")
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="time for all steps, in seconds, without the start of the process"
    )
    parser.add_argument("--apart", action="store_true", help="run two steps with each group in a separate process")
    parser.add_argument("--table", type=Path, help="print the tables of the lines in this file")
    args, keys = parser.parse_known_args(argv)
    if args.table is not None:
        by_keys = defaultdict(list)
        for line in map(json.loads, args.table.read_text(encoding="utf-8").splitlines()):
            by_keys[shlex.join(line["keys"])].append(line)
        for words, lines in by_keys.items():
            print(f"{words}\n\n{table(lines)}\n")
    elif args.apart and len(args.plain) > 1:
        shape = ["--documents", str(args.documents), "--length", str(args.length)]
        for case in args.plain:
            command = [sys.executable, "-m", "benchmarks.fused_ops", "--apart", "--plain", case, *shape, *keys]
            subprocess.run(command, check=True)
    else:
        _measure(args, keys)


if __name__ == "__main__":
    run_command(main)
