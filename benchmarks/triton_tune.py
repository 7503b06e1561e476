"""Choose the tile sizes of the Triton kernels, and write the tables of paddlenlp_ext/ops/triton_utils/tile_sizes.

    python -m benchmarks.triton_tune                               on a GPU: times, and the GPU's table
    python -m benchmarks.triton_tune --kernels rope gate_forward
    python -m benchmarks.triton_tune --compile 80 90               for compute capabilities 8.0 and 9.0, without a GPU
    TRITON_INTERPRET=1 python -m benchmarks.triton_tune --check    on a CPU: every candidate at small shapes

On a GPU, each candidate runs at the shapes of benchmarks/triton_tune_cases.py. The results must equal the results of
the tile sizes in the table, within the rounding of the dtype. The fastest candidate is written, by the median time with
the L2 cache flushed before each run. The sizes in the table are kept if no candidate is faster by 1 %. Timing and
`--check` use PyTorch tensors and need `torch` (requirements-peers.txt with a CUDA build of torch), but not Paddle.

`--compile` needs neither a GPU nor PyTorch. The choice is based on the registers, spilled registers and shared memory
of the compiled candidates. Candidates that do not fit are dropped. Candidates that spill registers are also dropped,
unless all candidates spill. The sizes in the table are kept if a multiprocessor can run enough warps with these sizes:
half of its maximum, or fewer if the kernel does not profit from more warps (`Case.enough`). Otherwise the most similar
candidate with enough warps is written, or the candidate with the most warps. Timed sizes are always kept.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.triton_resources import MULTIPROCESSORS, Compiler, Resources, Shaped
from benchmarks.triton_tune_cases import CASES, Case
from paddlenlp_ext.ops.triton_utils import tile_sizes

TIMED, COMPILED = "fastest", "compiled"
"""First words of a kernel's `source` in a table, for timed sizes and for sizes from compiled resources."""
GAIN = 0.99
TOLERANCES = {"torch.float32": 1e-5, "torch.float16": 2e-3, "torch.bfloat16": 1.6e-2}


class Shapes:
    """`Tensors` without memory, for the compiler."""

    small = False

    def random(self, *shape: int, dtype: str = "x16") -> Shaped:
        return Shaped(shape, "bf16" if dtype == "x16" else dtype)

    zeros = random

    def integers(self, high: int, *shape: int, dtype: str) -> Shaped:
        return Shaped(shape, dtype)

    def array(self, numbers: np.ndarray) -> Shaped:
        names = {"f": "fp", "i": "i", "u": "u"}
        return Shaped(numbers.shape, f"{names[numbers.dtype.kind]}{8 * numbers.dtype.itemsize}")

    def sum_rows(self, x: Shaped) -> Shaped:
        return x


class TorchTensors:
    """`Tensors` of PyTorch."""

    def __init__(self, device: str, small: bool) -> None:
        import torch

        self.torch, self.device, self.small = torch, device, small
        self.generator = torch.Generator(device).manual_seed(0)
        half = torch.bfloat16 if device == "cuda" else torch.float16  # Triton's interpreter truncates to bf16
        self.dtypes = {"x16": half, "fp32": torch.float32, "i64": torch.int64, "i32": torch.int32, "u8": torch.uint8}

    def random(self, *shape: int, dtype: str = "x16") -> Any:
        numbers = self.torch.randn(shape, generator=self.generator, device=self.device)
        return numbers.to(self.dtypes[dtype])

    def integers(self, high: int, *shape: int, dtype: str) -> Any:
        options = {"device": self.device, "dtype": self.dtypes[dtype]}
        return self.torch.randint(0, high, shape, generator=self.generator, **options)

    def zeros(self, *shape: int, dtype: str = "x16") -> Any:
        return self.torch.zeros(shape, device=self.device, dtype=self.dtypes[dtype])

    def array(self, numbers: np.ndarray) -> Any:
        return self.torch.from_numpy(numbers.copy()).to(self.device)

    def sum_rows(self, x: Any) -> Any:
        return x.sum(0)


def run_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on PyTorch's current stream."""
    kernel[grid](*arguments, **{"enable_fp_fusion": True, **constants})  # as ops/triton_utils/launch.py


def with_sizes(case: Case, candidate: dict[str, int], use: Callable[[], Any]) -> Any:
    """Call `use` while the kernel of a case has these sizes, and return the result."""
    case.sizes.fixed = candidate
    try:
        return use()
    finally:
        case.sizes.fixed = None


def candidates(case: Case, bounds: dict[str, int], path: Path) -> list[dict[str, int]]:
    """Return the candidates of an entry, sorted by their difference from the sizes in a table.

    If the table has no valid entry for the kernel, the candidates are in the order of `TileSizes.candidates`.
    """
    found = case.sizes.candidates(**bounds)
    entries = tile_sizes.read_table(path).get(case.sizes.kernel, {"sizes": []})["sizes"]
    if not entries or not all(map(case.sizes.is_entry, entries)):
        return found
    current = case.sizes.lookup(path, {name: bounds.get(name, sys.maxsize) for name in case.sizes.bounds})
    return sorted(found, key=lambda each: sum(abs(math.log2(each[name] / current[name])) for name in current))


def write(path: Path, kernel: str, source: str, entries: list[dict[str, int]], start: Path) -> None:
    """Replace the entries of a kernel in the table at `path`; if the table does not exist, copy `start` first."""
    table = dict(tile_sizes.read_table(path if path.exists() else start))
    table[kernel] = {"source": source, "sizes": entries}
    blocks = []
    for name in sorted(table):
        lines = ",\n".join(f"      {json.dumps(entry)}" for entry in table[name]["sizes"])
        source = json.dumps(table[name]["source"])
        blocks.append(f'  {json.dumps(name)}: {{\n    "source": {source},\n    "sizes": [\n{lines}\n    ]\n  }}')
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")
    tile_sizes.read_table.cache_clear()
    tile_sizes.table_path.cache_clear()


# -- results and times ------------------------------------------------------------------------------------------------
def results(case: Case, bounds: dict[str, int], device: str, small: bool) -> list[Any]:
    """Return copies of the results of one run."""
    return [each.clone() for each in case.run(TorchTensors(device, small), bounds)(run_kernel)]


def assert_equal(case: Case, candidate: dict[str, int], found: list[Any], expected: list[Any]) -> None:
    """Check that results equal the results of other tile sizes, within the rounding of their dtype."""
    for one, other in zip(found, expected, strict=True):
        difference, size = (one.double() - other.double()).norm(), other.double().norm()
        limit = TOLERANCES.get(str(one.dtype), 0.0) * size
        assert difference <= limit, f"{case.sizes.kernel} {candidate}: results differ by {difference} of {size}"


def check(case: Case) -> int:
    """Run every candidate at small shapes on a CPU; return their number."""
    count = 0
    for bounds in case.bounds:
        found_candidates = case.sizes.candidates(**bounds)
        expected: list[Any] = []
        for candidate in found_candidates:
            found = with_sizes(case, candidate, lambda bounds=bounds: results(case, bounds, "cpu", small=True))
            expected = expected or found
            assert_equal(case, candidate, found, expected)
        count += len(found_candidates)
    return count


def fastest(case: Case, bounds: dict[str, int], path: Path) -> tuple[dict[str, int], float]:
    """Return the fastest sizes of an entry and their time in milliseconds."""
    import triton

    from benchmarks.triton_timing import milliseconds

    ordered = candidates(case, bounds, path)
    best, best_time, expected = {}, math.inf, []
    for candidate in ordered:

        def measure(bounds: dict[str, int] = bounds) -> tuple[list[Any], float]:
            run = case.run(TorchTensors("cuda", small=False), bounds)
            found = [each.clone() for each in run(run_kernel)]
            return found, milliseconds(lambda: run(run_kernel))

        try:
            found, time = with_sizes(case, candidate, measure)
        except triton.runtime.errors.OutOfResources:
            continue
        expected = expected or found
        assert_equal(case, candidate, found, expected)
        if time < GAIN * best_time or (time < best_time and best != ordered[0]):
            best, best_time = candidate, time
    assert best, f"no candidate of {case.sizes.kernel} can be launched for {bounds}"
    return best, best_time


def time_all(kernels: list[str]) -> None:
    """Write the table of this machine's GPU."""
    import torch

    capability = tile_sizes.capability_of(torch.cuda.current_device())
    path, versions = tile_sizes.FOLDER / f"sm_{capability}.json", f"PyTorch {torch.__version__}, {_triton()}"
    source = f"{TIMED} on an {torch.cuda.get_device_name()}, {datetime.date.today().isoformat()}, {versions}"
    for kernel in kernels:
        case, entries = CASES[kernel], []
        for bounds in case.bounds:
            best, time = fastest(case, bounds, tile_sizes.table_path(capability))
            print(kernel, bounds, best, f"{time:.4f} ms", flush=True)
            entries.append({**bounds, **best})
        write(path, kernel, source, entries, tile_sizes.table_path(capability))


# -- compiled resources -----------------------------------------------------------------------------------------------
def compiled(case: Case, bounds: dict[str, int], candidate: dict[str, int], capability: int) -> Resources:
    """Return the resources of a candidate."""
    compiler = Compiler(capability)
    with_sizes(case, candidate, lambda: case.run(Shapes(), bounds)(compiler))
    (found,) = compiler.compiled
    return found


def roomiest(case: Case, bounds: dict[str, int], capability: int, path: Path) -> dict[str, int]:
    """Return the candidate with the fewest spills; among equals, the most warps win, counted up to `case.enough`."""
    current, *_ = ordered = candidates(case, bounds, path)
    best: tuple[Any, dict[str, int], Resources] | None = None
    for candidate in ordered:
        if candidate.get("PROGRAMS") != current.get("PROGRAMS"):
            continue  # the number of programs does not change the compiled kernel
        resources = compiled(case, bounds, candidate, capability)
        if resources.fits(capability):
            rank = -resources.spilled, min(resources.occupancy(capability), case.enough)
            best = max(best or (rank, candidate, resources), (rank, candidate, resources), key=lambda each: each[0])
            if rank == (0, case.enough):
                break
    assert best is not None, f"no candidate of {case.sizes.kernel} fits sm_{capability} for {bounds}"
    mark = "" if best[1] == current else f" instead of {current}"
    print(f"sm_{capability} {case.sizes.kernel} {bounds} {best[1]}{mark} {best[2]}", flush=True)
    return best[1]


def compile_all(capabilities: list[int], kernels: list[str]) -> None:
    """Write the tables of these capabilities."""
    source = f"{COMPILED} by {_triton()} without a GPU: registers, spills and shared memory; not timed"
    for capability in capabilities:
        path, start = tile_sizes.FOLDER / f"sm_{capability}.json", tile_sizes.table_path(capability)
        for kernel in kernels:
            case, known = CASES[kernel], tile_sizes.read_table(start).get(kernel)
            if path == start and known and known["source"].startswith(TIMED):
                continue
            entries = [{**bounds, **roomiest(case, bounds, capability, start)} for bounds in case.bounds]
            write(path, kernel, source, entries, start)


def _triton() -> str:
    return f"Triton {importlib.metadata.version('triton')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kernels", nargs="+", choices=CASES, default=[*CASES], help="kernels whose tile sizes are chosen"
    )
    parser.add_argument("--check", action="store_true", help="only compare the candidates with each other on a CPU")
    parser.add_argument(
        "--compile",
        nargs="+",
        type=int,
        choices=MULTIPROCESSORS,
        metavar="CAPABILITY",
        help="choose tile sizes for these compute capabilities, without a GPU",
    )
    args = parser.parse_args()
    if args.check:
        for kernel in args.kernels:
            print(f"{kernel}: {check(CASES[kernel])} candidates agree", flush=True)
    elif args.compile:
        compile_all(args.compile, args.kernels)
    elif tile_sizes.capability_of(0) is None:
        raise SystemExit("times need an NVIDIA GPU; --compile chooses sizes without a GPU, --check compares on a CPU")
    else:
        time_all(args.kernels)


if __name__ == "__main__":
    main()
