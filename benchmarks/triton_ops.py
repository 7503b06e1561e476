"""Speed and memory of the Triton kernels of norms, rotations and gates on a GPU, beside PyTorch and Liger-Kernel.

Uses PyTorch's tensors. Needs `torch` and `triton` (requirements-peers.txt with a CUDA build of torch), but not Paddle;
measures `liger_kernel` if it is installed. Prints one JSON line per op, shape and program:

    python -m benchmarks.triton_ops
    python -m benchmarks.triton_ops --ops rope swiglu --programs ours liger
    TRITON_INTERPRET=1 python -m benchmarks.triton_ops --check        on a CPU: small, no times

| program | |
| --- | --- |
| ours | the kernels of paddlenlp_ext/ops with the launches of the Triton backends |
| eager, compiled | the formula in PyTorch, in the dtype of transformers' layers; the same through torch.compile |
| liger | the function of Liger-Kernel |

Times are medians with the L2 cache flushed before each run. `forward_copy_share` and `both_copy_share` are shares of
the bandwidth of a copy of a tensor larger than the caches, counting each input and result of a pass once. `peak_mb` is
what a forward and a backward pass allocate. `errors` are distances from the formula in float64, relative to its norm,
of results and gradients.

benchmarks/triton_cases.py has the ops and their shapes.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence

import torch
import triton

from benchmarks.measure import report
from benchmarks.triton_cases import BF16, OPS, Case, Op

PROGRAMS = ("ours", "eager", "compiled", "liger")


def results_and_gradients(
    op: Op, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the results of an op and all gradients, for random gradients of the results that depend on shapes only."""
    own = [x.detach().to(dtype or x.dtype).clone().requires_grad_(x.requires_grad) for x in inputs]
    passed = [x * 1 if x.requires_grad else x for x in own]  # ops may overwrite what they are passed
    outs = op(*passed)
    outs = [outs] if isinstance(outs, torch.Tensor) else list(outs)
    results = [out.detach().clone() for out in outs]
    generator = torch.Generator(own[0].device).manual_seed(1)
    gradients = [
        torch.randn(out.shape, generator=generator, device=out.device).to(inputs[0].dtype).to(out.dtype) for out in outs
    ]
    return results + list(torch.autograd.grad(outs, [x for x in own if x.requires_grad], gradients))


def errors(op: Op, case: Case) -> list[float]:
    """Return the relative distances of results and gradients from the formula in float64."""
    found = results_and_gradients(op, case.inputs)
    exact = results_and_gradients(case.formula, case.inputs, torch.float64)
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


def check(device: str, names: Sequence[str]) -> None:
    """Compare the kernels with the formulas in float64 at small shapes."""
    for name in names:
        make, _, sizes = OPS[name]
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 1e-3), (BF16, 8e-3)):
            if device == "cpu" and dtype == BF16:
                continue  # the interpreter truncates, a GPU rounds
            case = make(dtype, device, *sizes)
            found = errors(case.ours, case)
            assert max(found) < tolerance, (name, dtype, found)


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call in milliseconds, with the L2 cache flushed before each call."""
    return triton.testing.do_bench(run, return_mode="median")


def copy_bandwidth() -> float:
    """Return the GB/s that a copy of 2 GB reads and writes."""
    source = torch.empty(1 << 30, dtype=BF16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / milliseconds(lambda: target.copy_(source)) / 1e6


def program_of(case: Case, program: str) -> Op | None:
    """Return the op of a program, or None if it has none or is not installed."""
    if program == "liger":
        return case.liger() if case.liger and importlib.util.find_spec("liger_kernel") else None
    if program == "compiled":
        return torch.compile(case.formula, dynamic=False)
    return case.ours if program == "ours" else case.formula


def measure(case: Case, op: Op, copy_gb_per_s: float) -> dict[str, object]:
    """Return times, shares of the bandwidth, memory and errors of an op."""
    trained = [x for x in case.inputs if x.requires_grad]
    outs = op(*case.inputs)
    gradients = [torch.randn_like(out) for out in ([outs] if isinstance(outs, torch.Tensor) else outs)]
    del outs

    def both() -> object:
        outs = op(*case.inputs)
        return torch.autograd.grad([outs] if isinstance(outs, torch.Tensor) else outs, trained, gradients)

    figures: dict[str, object] = {"errors": [float(f"{error:.2g}") for error in errors(op, case)]}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    figures["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    for name, run, moved in (
        ("forward", lambda: op(*case.inputs), case.forward_bytes),
        ("both", both, case.forward_bytes + case.backward_bytes),
    ):
        time = milliseconds(run)
        figures[f"{name}_ms"] = round(time, 4)
        figures[f"{name}_copy_share"] = round(moved / time / 1e6 / copy_gb_per_s, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the kernels with PyTorch at small shapes")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=[*OPS], help="ops to run")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS, help="programs to measure")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.check:
        raise SystemExit("times need a GPU; with TRITON_INTERPRET=1 and --check the kernels run on a CPU")
    torch.manual_seed(0)
    check(device, args.ops)
    if args.check:
        print(f"{', '.join(args.ops)}: the kernels agree with PyTorch on the {device}")
        return
    copy = copy_bandwidth()
    card = {"gpu": torch.cuda.get_device_name(), "copy_gb_per_s": round(copy)}
    packages = ["torch", "triton", *(["liger_kernel"] if importlib.util.find_spec("liger_kernel") else [])]
    for name in args.ops:
        make, shapes, _ = OPS[name]
        for label, (dtype, *sizes) in shapes.items():
            for program in args.programs:
                case = make(dtype, "cuda", *sizes)
                op = program_of(case, program)
                if op is None:
                    continue
                run = {"op": name, "shape": label, "sizes": sizes, "dtype": str(dtype), "program": program}
                report("triton_ops", {**card, **run, **measure(case, op, copy)}, *packages)
                del case, op
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
