"""Sizes of the programs of Triton kernels, from a table per compute capability; independent of Paddle and PyTorch.

A module of kernels declares the sizes of each with the values that they can have, and asks for them at a launch:

    SIZES = TileSizes("rms_norm_forward", bounds=("columns",), ROWS=(1, 2, 4), num_warps=(4, 8, 16))
    SIZES(x, columns=3000)        ->  {"ROWS": 1, "num_warps": 8}

The table is that of the GPU of the tensor x.

The tables are the files sm_*.json of this folder, by compute capability. Each kernel has the source of its sizes, such
as the GPU on which they were the fastest, and a list of entries. An entry has a bound of each number of the launch
(none: any number) and the sizes; the first entry applies whose bounds are at least the numbers:

    {"columns": 4096, "ROWS": 1, "num_warps": 8}

A GPU without a table of its own takes that of the next older capability. The oldest table is for still older ones, for
GPUs of other vendors, and for Triton's interpreter on a CPU. benchmarks/triton_tune.py writes the tables.

Sizes change the order of sums: results on GPUs with different tables can differ in the last digits. On one GPU they
have the same bits in every run.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_REMEDY = "write the table again with python -m benchmarks.triton_tune"


class TileSizes:
    """Sizes of the programs of a kernel.

    Attributes:
        kernel: name in the tables.
        bounds: names of the numbers of a launch on which the sizes depend.
        choices: name of a size -> its values in ascending order; `num_warps` and `num_stages` are Triton's.
        fixed: sizes that replace those of the tables, for tests and measurements; None: those of the tables.
    """

    def __init__(
        self,
        kernel: str,
        bounds: tuple[str, ...] = (),
        allows: Callable[[dict[str, int]], bool] = lambda entry: True,
        **choices: tuple[int, ...],
    ) -> None:
        self.kernel, self.bounds, self.choices, self._allows = kernel, bounds, choices, allows
        self.fixed: dict[str, int] | None = None
        self._entries: dict[Path, list[dict[str, int]]] = {}
        self._found: dict[tuple[Any, ...], dict[str, int]] = {}

    def __call__(self, x: Any, /, **numbers: int) -> dict[str, int]:
        """Return the sizes for a launch.

        Args:
            x: tensor on the GPU of the launch, of Paddle or PyTorch.
            numbers: values of the `bounds`.

        Raises:
            ValueError: the table has no entry for the numbers, or a wrong one.
        """
        assert numbers.keys() == set(self.bounds), f"{self.kernel} depends on {self.bounds}, not on {[*numbers]}"
        if self.fixed is not None:
            return dict(self.fixed)
        path = table_path(device_capability(x))
        key = path, *numbers.items()
        if key not in self._found:  # a lookup takes microseconds of each launch
            self._found[key] = self.lookup(path, numbers)
        return dict(self._found[key])

    def lookup(self, path: Path, numbers: dict[str, int]) -> dict[str, int]:
        """Return the sizes that a table has for a launch with these numbers."""
        for entry in self.entries(path):
            if all(number <= entry.get(name, number) for name, number in numbers.items()):
                return {name: entry[name] for name in self.choices}
        raise ValueError(f"{path}: {self.kernel} has no sizes for {numbers}; {_REMEDY}")

    def entries(self, path: Path) -> list[dict[str, int]]:
        """Return the entries of a table.

        Raises:
            ValueError: the table does not have the kernel, or sizes that are not candidates.
        """
        if path not in self._entries:
            self._entries[path] = self._read_entries(path)
        return self._entries[path]

    def _read_entries(self, path: Path) -> list[dict[str, int]]:
        kernels = read_table(path)
        if self.kernel not in kernels:
            raise ValueError(f"{path}: {self.kernel} is missing; {_REMEDY}")
        for entry in (entries := kernels[self.kernel]["sizes"]):
            if not self.is_entry(entry):
                raise ValueError(f"{path}: {self.kernel}: {entry} is not one of its candidates; {_REMEDY}")
        return entries

    def is_entry(self, entry: dict[str, int]) -> bool:
        """Return whether an entry has known bounds, and sizes that are a candidate."""
        known = self.choices.keys() <= entry.keys() <= self.choices.keys() | set(self.bounds)
        return known and all(entry[name] in values for name, values in self.choices.items()) and self._allows(entry)

    def candidates(self, **bounds: int) -> list[dict[str, int]]:
        """Return all sizes that an entry with these bounds can have."""
        products = itertools.product(*self.choices.values())
        sizes = [dict(zip(self.choices, values, strict=True)) for values in products]
        return [each for each in sizes if self._allows(bounds | each)]


def shrunk(sizes: dict[str, int], name: str, count: int) -> dict[str, int]:
    """Return sizes of which `name` is at most the power of two from `count` on, with proportionally fewer warps."""
    least = min(sizes[name], 1 << (count - 1).bit_length())
    return sizes | {name: least, "num_warps": max(1, sizes["num_warps"] * least // sizes[name])}


def device_capability(x: Any) -> int | None:
    """Return the compute capability, such as 90, of a tensor's GPU; None on a CPU or without a GPU of NVIDIA."""
    if _cuda() is None:
        return None
    # Paddle's `device` takes three times as long as its `place`, which PyTorch's tensors lack.
    device = x.place.gpu_device_id() if hasattr(x, "place") else x.device.index
    return None if device is None else capability_of(device)


@functools.cache
def _cuda() -> ctypes.CDLL | None:
    """Return CUDA's driver; None without a GPU. Triton's own driver depends on which PyTorch has been imported."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if cuda.cuInit(0) else cuda


@functools.cache
def capability_of(device: int) -> int | None:
    """Return the compute capability of a GPU by its number; None without a GPU of NVIDIA."""
    cuda, parts = _cuda(), [ctypes.c_int(), ctypes.c_int()]
    if cuda is None:
        return None
    for attribute, part in zip((75, 76), parts, strict=True):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        error = cuda.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
        assert error == 0, f"CUDA error {error}: no compute capability of device {device}"
    return 10 * parts[0].value + parts[1].value


@functools.cache
def table_path(capability: int | None) -> Path:
    """Return the table of a compute capability, or of the next older one; the oldest for None."""
    paths = {int(path.stem.removeprefix("sm_")): path for path in FOLDER.glob("sm_*.json")}
    older = [each for each in paths if capability is not None and each <= capability]
    return paths[max(older) if older else min(paths)]


@functools.cache
def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """Return the kernels of a table, each with its `source` and its `sizes`.

    Raises:
        ValueError: the file is not a table.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}; {_REMEDY}") from error
    if not (isinstance(table, dict) and all(_is_kernel(value) for value in table.values())):
        raise ValueError(f"{path}: not an object of kernels with source and sizes; {_REMEDY}")
    return table


def _is_kernel(value: Any) -> bool:
    if not (isinstance(value, dict) and value.keys() == {"source", "sizes"} and isinstance(value["sizes"], list)):
        return False
    return all(isinstance(each, dict) and all(type(size) is int for size in each.values()) for each in value["sizes"])
