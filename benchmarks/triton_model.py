"""Training steps of a Llama with LoRA on a GPU: transformers with and without this project's Triton kernels.

Needs requirements-peers.txt with a CUDA build of torch, but not Paddle. Weights are random and generated on the GPU;
nothing is downloaded. PyTorch computes attention and the large matmuls in all programs. Prints one JSON line per
program:

    python -m benchmarks.triton_model                              Llama 3 8B in bfloat16, 2 x 4096 tokens
    python -m benchmarks.triton_model --base nf4 --recompute       QLoRA, layers recomputed in the backward pass
    python -m benchmarks.triton_model --table                      each group of kernels switched on and off
    python -m benchmarks.triton_model --table                      without a GPU: counts of memory and operators
    TRITON_INTERPRET=1 python -m benchmarks.triton_model --check   on a CPU: a tiny model, losses and gradients

| program | |
| --- | --- |
| eager | transformers, PEFT and PyTorch's fused AdamW |
| ours | the same model with the kernels of paddlenlp_ext/ops (benchmarks/triton_llama.py) |
| liger | Liger-Kernel's patch of transformers with PEFT and PyTorch's fused AdamW, if it is installed |

For an nf4 base, eager and liger use bitsandbytes ("nf4_peer" under `weights`). If bitsandbytes is not installed, eager
and liger use unquantized weights with the same values ("nf4_dense"): the losses can then be compared, but not the
memory.

Each program runs in a separate process, with the same weights and data. `ms` is the median time of the steps after the
first five, `peak_gib` is the peak memory of tensors during the steps, including weights, `losses` are the losses of all
steps, and `loss_difference` is the largest difference from the losses of eager.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.measure import report
from benchmarks.triton_cases import num_bytes
from benchmarks.triton_counts import count, drop_values
from benchmarks.triton_llama import KERNELS, PackedLinear, Shape, Training, in_training, make_model, quantize
from benchmarks.triton_peers import in_bitsandbytes, with_liger
from benchmarks.triton_table import configurations, largest_difference, markdown, token_batches
from benchmarks.triton_timing import device_of

PROGRAMS = {"eager": "transformers", "ours": "triton", "liger": "liger_kernel"}
"""Programs, and the packages that they need."""
WARM_UP = 5
TINY = Shape(hidden=32, intermediate=56, layers=2, heads=4, key_heads=2, vocabulary=97)
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float16: (5e-3, 3e-2)}
"""Largest difference of losses, and distance of gradients relative to their norm."""


def make_training(
    program: str, shape: Shape, dtype: torch.dtype, device: str, kernels: Sequence[str], base: str, **options: Any
) -> Training:
    """Return the training of a program; only `ours` takes kernels.

    Bases: "bf16" for unquantized weights of any dtype; "nf4" by our kernel; "nf4_peer" by bitsandbytes; "nf4_dense" for
    unquantized weights that have the values of nf4.
    """
    prepare: list[Callable[[Any], object]] = [with_liger] if program == "liger" else []
    if base == "nf4_peer":
        prepare.append(functools.partial(in_bitsandbytes, dtype=dtype))
    model = make_model(shape, dtype, device, prepare=prepare, **options)
    if base in ("nf4", "nf4_dense"):
        quantize(model, dequantized=base == "nf4_dense")
    return in_training(model, dtype, kernels if program == "ours" else ())


# -- on a GPU ---------------------------------------------------------------------------------------------------------
def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return time, memory and losses of a program's steps."""
    program, base = args.programs[0], args.base
    if base == "nf4" and program != "ours":
        base = "nf4_peer" if importlib.util.find_spec("bitsandbytes") else "nf4_dense"
    options = {"rank": args.rank, "recompute": args.recompute, "base": base}
    training = make_training(program, _shape(args), torch.bfloat16, "cuda", args.kernels, **options)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for ids in torch.from_numpy(token_batches(args.steps, args.batch, args.length, args.vocabulary)).cuda():
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(training.step(ids).item())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    step = statistics.median(seconds[WARM_UP:])
    return {
        "weights": base,
        "tokens_per_second": round(args.batch * args.length / step),
        "ms": round(step * 1000, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": losses,
    }


def measured_apart(args: argparse.Namespace, program: str, kernels: Sequence[str]) -> dict[str, Any]:
    """Return the figures of `measure` from a new process, or the last line of its error, or its exit code."""
    command = [sys.executable, "-m", "benchmarks.triton_model", "--measure", "--programs", program]
    for name in ("batch", "length", "steps", "rank", "base", *Shape._fields):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--recompute"] * args.recompute + ["--kernels", *kernels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def compare(args: argparse.Namespace) -> None:
    """Print one line per program."""
    packages = [name for name in ("liger_kernel", "bitsandbytes") if importlib.util.find_spec(name)]
    losses: list[float] = []
    for program in args.programs:
        if importlib.util.find_spec(PROGRAMS[program]) is None:
            continue
        figures = measured_apart(args, program, args.kernels)
        if program == "eager":
            losses = figures.get("losses", [])
        if losses and "losses" in figures:
            figures["loss_difference"] = largest_difference(figures["losses"], losses)
        run = {"gpu": torch.cuda.get_device_name(), "program": program, **_run(args)}
        report("triton_model", {**run, **figures}, "torch", "triton", "transformers", "peft", *packages)


def measured_table(args: argparse.Namespace) -> str:
    """Return a table with a row per configuration of kernels: time, memory and largest difference of the losses."""
    rows: dict[str, list[object]] = {}
    losses: list[float] = []
    for name, kernels in configurations([*KERNELS]).items():
        figures = measured_apart(args, "ours", kernels)
        if "error" in figures:
            rows[name] = [figures["error"], "", "", ""]
            continue
        losses = losses or figures["losses"]
        difference = largest_difference(figures["losses"], losses)
        rows[name] = [figures["ms"], figures["tokens_per_second"], figures["peak_gib"], difference]
        print(name, rows[name], file=sys.stderr, flush=True)
    return markdown(["ms per step", "tokens/s", "peak GiB", "largest difference of losses"], rows)


# -- without a GPU ----------------------------------------------------------------------------------------------------
def counted_table(args: argparse.Namespace) -> str:
    """Return the table of memory and work by groups of kernels, counted without a GPU."""
    rows: dict[str, list[object]] = {}
    counted = [name for name in KERNELS if name != "adamw"]  # the passes are counted, not the update
    for name, kernels in configurations(counted).items():
        model = make_model(_shape(args), torch.bfloat16, "meta", rank=args.rank, recompute=args.recompute)
        with FakeTensorMode(allow_non_fake_inputs=True):
            drop_values(model)
            if args.base == "nf4":
                quantize(model)
            training = in_training(model, torch.bfloat16, kernels)
            ids = torch.zeros(args.batch, args.length, dtype=torch.int64)
            counts = count(functools.partial(training.loss, ids))
        trained = sum(each.numel() for each in training.parameters())
        packed = sum(each.packed.num_bytes for each in model.modules() if isinstance(each, PackedLinear))
        fixed = packed + num_bytes(*model.parameters()) + 8 * trained  # and moments
        memory = [round(each / 2**30, 2) for each in (counts.saved, counts.peak + fixed)]
        moved = [round(each / 1e9) for each in (counts.moved, counts.launched_bytes)]
        rows[name] = [*memory, counts.operators, counts.launches, *moved]
        print(name, rows[name], file=sys.stderr, flush=True)
    heads = [
        "GiB saved for backward",
        "peak GiB",
        "operators",
        "Triton kernels among the operators",
        "GB moved",
        "GB moved by Triton kernels",
    ]
    return markdown(heads, rows)


def check(device: str) -> None:
    """Compare losses and first gradients of a tiny model with our kernels to transformers and PEFT."""
    batches = torch.from_numpy(token_batches(3, 2, 9, TINY.vocabulary)).to(device)
    for dtype, (of_loss, of_gradient) in TOLERANCES.items():
        for base, reference in (("bf16", "bf16"), ("nf4", "nf4_dense")):
            make = functools.partial(make_training, shape=TINY, dtype=dtype, device=device, rank=5, zero_b=False)
            expected = _steps(make("eager", kernels=(), base=reference, recompute=False), batches)
            everything = [(tuple(KERNELS), recompute) for recompute in (False, True)]
            alone = [((name,), False) for name in KERNELS] if (dtype, base) == (torch.float32, "bf16") else []
            for kernels, recompute in everything + alone:
                losses, gradients = _steps(make("ours", kernels=kernels, base=base, recompute=recompute), batches)
                case = f"{dtype}, {base}, {', '.join(kernels)}, {'with' if recompute else 'without'} recompute"
                difference = largest_difference(losses, expected[0])
                assert difference < of_loss, f"{case}: losses {losses}, expected {expected[0]}"
                pairs = zip(gradients, expected[1], strict=True)
                distance = max(float((one - other).norm() / other.norm()) for one, other in pairs)
                assert distance < of_gradient, f"{case}: gradients are {distance} away"
                print(f"{case}: losses differ by {difference:.1e}, gradients by {distance:.1e}", flush=True)


def _steps(training: Training, batches: torch.Tensor) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of all steps, and the gradients of the first step."""
    training.loss(batches[0]).backward()
    gradients = [each.grad.clone() for each in training.parameters()]
    for each in training.parameters():
        each.grad = None
    return [training.step(ids).item() for ids in batches], gradients


# -- arguments --------------------------------------------------------------------------------------------------------
def _shape(args: argparse.Namespace) -> Shape:
    return Shape(*(getattr(args, name) for name in Shape._fields))


def _run(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields that describe a run."""
    names = "batch", "length", "steps", "rank", "base", "recompute"
    return {name: getattr(args, name) for name in names} | {"shape": _shape(args)._asdict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="only compare a tiny model with unmodified transformers and PEFT"
    )
    parser.add_argument("--table", action="store_true", help="print a table of the groups of kernels")
    parser.add_argument("--measure", action="store_true", help="print the figures of one program, for internal use")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS], help="programs to measure")
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=[*KERNELS], help="groups of kernels to use")
    parser.add_argument("--base", choices=("bf16", "nf4"), default="bf16", help="format of the frozen weights")
    parser.add_argument("--recompute", action="store_true", help="recompute layers in the backward pass")
    for name, value in {"batch": 2, "length": 4096, "steps": 50, "rank": 16, **Shape()._asdict()}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps {args.steps}: the first {WARM_UP} steps are not timed; pass a larger number")
    device = device_of(args.check or args.table)
    if args.check:
        check(device)
    elif args.measure:
        print(json.dumps(measure(args)))
    elif args.table:
        print(measured_table(args) if device == "cuda" else counted_table(args))
    else:
        compare(args)


if __name__ == "__main__":
    main()
