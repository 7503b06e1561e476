"""Speed and memory of the ops' Triton kernels on a GPU, compared with PyTorch and the packages in `PEERS`.

Uses PyTorch tensors. Needs `torch` and `triton` (requirements-peers.txt with a CUDA build of torch), but not Paddle;
measures the packages in `PEERS` that are installed. Prints one JSON line per op, shape and program:

    python -m benchmarks.triton_ops
    python -m benchmarks.triton_ops --ops rope loss_frozen --programs ours peer
    TRITON_INTERPRET=1 python -m benchmarks.triton_ops --check        on a CPU: small shapes, no times

| op | |
| --- | --- |
| rms_norm, add_rms_norm | norm of hidden states, without and with a residual addition |
| rope, norm_rope | rotation of queries and keys, without and with norms of the heads |
| swiglu, geglu | gates of feed-forward layers |
| loss, loss_frozen | trained or frozen lm_head, with the loss |
| lora_linear | frozen linear layer with a low-rank update |
| attention, attention_softcap, _sinks, _alibi | causal attention of one row of documents, with and without a window |
| causal_convolution | depthwise convolution of packed documents |
| gated_delta_rule, state_space_duality | recurrences of Qwen3.5 and Mamba-2, on one document and on a pack |
| adamw, adamw_8bit | one step for the factors of LoRA r 16 on all linear layers of an 8B model |
| norm_linear | residual addition, norm, and the projections after the norm (q, k, v; gate, up), 1 to 16 positions |
| packed_linear | other quantized layers (o; down), with 1 to 16 positions |
| lora_one_pass, lora_in_parts | forward pass of a LoRA layer in one launch, or as base matmul and in-place update |

| program | |
| --- | --- |
| ours | the kernels of paddlenlp_ext/ops with the launches of the Triton backends (benchmarks/triton_torch.py) |
| eager, compiled | the formula in PyTorch, in the dtype of transformers' layers, without and with torch.compile |
| peer | Liger-Kernel, PyTorch's fused AdamW and SDPA, bitsandbytes' 8-bit AdamW and nf4 products, causal_conv1d, |
| | gated delta rule of flash-linear-attention, state space duality of mamba_ssm |

Times are medians of the forward pass and of both passes, with the L2 cache flushed before each run. Bandwidths count
each input and result of a pass once, and are divided by `copy_gb_per_s`, the bandwidth of a copy of a tensor larger
than the caches. `both_tflops` counts the large matmuls, and is divided by `matmul_tflops`, the rate of a matmul in
bfloat16. `peak_mb` is the memory that a forward and a backward pass allocate. `errors` are the norms of the differences
of results and gradients from the formula in float64, relative to the norm of the formula's values. The formulas of
quantized layers multiply by weights that were dequantized beforehand.

benchmarks/triton_cases_*.py have the ops and their shapes.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

import torch

from benchmarks import (
    triton_cases_attention,
    triton_cases_decoding,
    triton_cases_layers,
    triton_cases_recurrences,
    triton_cases_training,
)
from benchmarks.measure import report
from benchmarks.triton_cases import BF16, F32, PROGRAMS, Case, Op
from benchmarks.triton_timing import copy_bandwidth, device_of, matmul_rate, milliseconds

OPS = {
    **triton_cases_layers.OPS,
    **triton_cases_training.OPS,
    **triton_cases_decoding.OPS,
    **triton_cases_attention.OPS,
    **triton_cases_recurrences.OPS,
}
PEERS = {
    **{name: name for name in ("liger_kernel", "bitsandbytes", "causal_conv1d", "mamba_ssm")},
    "fla": "flash-linear-attention",
}
"""Name of a module -> name of its package, for programs of other projects."""
TOLERANCES = {F32: 2e-6, torch.float16: 1e-3, BF16: 8e-3}


def as_list(results: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of an op as a list."""
    return [results] if isinstance(results, torch.Tensor) else [*results]


def results_and_gradients(
    op: Op, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the results of an op and all gradients, for random gradients of the results that depend on shapes only."""
    own = [x.detach().to(dtype or x.dtype).clone().requires_grad_(x.requires_grad) for x in inputs]
    passed = [x * 1 if x.requires_grad else x for x in own]  # ops may overwrite their arguments
    outs = as_list(op(*passed))
    results, trained = [out.detach().clone() for out in outs], [x for x in own if x.requires_grad]
    if not trained:
        return results
    generator = torch.Generator(own[0].device).manual_seed(1)
    gradients = [
        torch.randn(out.shape, generator=generator, device=out.device).to(inputs[0].dtype).to(out.dtype) for out in outs
    ]
    return results + list(torch.autograd.grad(outs, trained, gradients))


def errors(op: Op, case: Case) -> list[float]:
    """Return the relative distances of results and gradients from the formula in float64."""
    found = results_and_gradients(op, case.inputs)
    exact = results_and_gradients(case.formula, case.inputs, torch.float64)
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


def check(device: str, names: Sequence[str]) -> None:
    """Compare the kernels with the formulas in float64 at small shapes."""
    for name in names:
        for dtype in OPS[name].dtypes:
            if device == "cpu" and dtype == BF16:
                continue  # Triton's interpreter truncates float32 to bfloat16, but a GPU rounds
            for sizes in OPS[name].checks:
                case = OPS[name].make(dtype, device, *sizes)
                found = errors(case.ours, case)
                assert max(found) < TOLERANCES[dtype], (name, sizes, dtype, found)


def program_of(case: Case, program: str) -> Op | None:
    """Return the op of a program; None if the program lacks the op or is not installed."""
    if program not in case.programs:
        return None
    if program == "peer":
        return case.peer.make() if case.peer and importlib.util.find_spec(case.peer.package) else None
    if program == "compiled":
        return torch.compile(case.compilable or case.formula, dynamic=False)
    return case.ours if program == "ours" else case.formula


def measure(case: Case, op: Op, copy_gb_per_s: float, matmul_tflops: float) -> dict[str, object]:
    """Return times, memory and errors of an op, and its rates relative to a copy or to a matmul."""
    figures: dict[str, object] = {"errors": [float(f"{error:.2g}") for error in errors(op, case)]}
    trained = [x for x in case.inputs if x.requires_grad]
    gradients = [torch.randn_like(out) for out in as_list(op(*case.inputs))]

    def both() -> object:
        outs = as_list(op(*case.inputs))
        return torch.autograd.grad(outs, trained, gradients) if trained else outs

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    figures["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    passes = {"forward": (lambda: op(*case.inputs), case.forward_bytes, case.forward_operations)}
    if trained:
        passes["both"] = both, case.forward_bytes + case.backward_bytes, case.operations
    for name, (run, moved, operations) in passes.items():
        time = milliseconds(run)
        figures[f"{name}_ms"] = round(time, 4)
        if moved:
            figures[f"{name}_copy_share"] = round(moved / time / 1e6 / copy_gb_per_s, 3)
        if operations:
            tflops = operations / time / 1e9
            figures |= {f"{name}_tflops": round(tflops, 1), f"{name}_matmul_share": round(tflops / matmul_tflops, 3)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the kernels with PyTorch at small shapes")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=[*OPS], help="ops to run")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS, help="programs to measure")
    args = parser.parse_args()
    device = device_of(args.check)
    torch.manual_seed(0)
    check(device, args.ops)
    if args.check:
        print(f"{', '.join(args.ops)}: the kernels agree with PyTorch on the {device}")
        return
    copy, rate = copy_bandwidth(), matmul_rate()
    card = {"gpu": torch.cuda.get_device_name(), "copy_gb_per_s": round(copy), "matmul_tflops": round(rate)}
    packages = [package for name, package in PEERS.items() if importlib.util.find_spec(name)]
    for name in args.ops:
        for label, (dtype, *sizes) in OPS[name].shapes.items():
            for program in args.programs:
                case = OPS[name].make(dtype, "cuda", *sizes)
                op = program_of(case, program)
                if op is None:
                    continue
                run = {"op": name, "shape": label, "sizes": sizes, "dtype": str(dtype), "program": program}
                figures = {**card, **run, **measure(case, op, copy, rate)}
                report("triton_ops", figures, "torch", "triton", *packages)
                del case, op
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
