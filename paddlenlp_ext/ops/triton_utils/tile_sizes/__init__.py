"""Tile sizes of Triton kernels, from a table per compute capability; independent of Paddle and PyTorch.

Each module of kernels declares the allowed tile sizes of its kernels. Each launch looks up the tile sizes:

    SIZES = TileSizes("rms_norm_forward", bounds=("columns",), ROWS=(1, 2, 4), num_warps=(4, 8, 16))
    SIZES(x, columns=3000)        ->  {"ROWS": 1, "num_warps": 8}

The lookup uses the table of the GPU that holds the tensor x.

The tables are the files sm_*.json in this folder, one per compute capability. For each kernel, a table contains the
source of the sizes, such as the GPU on which the sizes were fastest, and a list of entries. An entry contains sizes and
optional upper bounds of launch parameters. The lookup returns the first entry whose bounds are not exceeded:

    {"columns": 4096, "ROWS": 1, "num_warps": 8}

A GPU whose capability has no table uses the table of the next lower capability. The table of the lowest capability also
applies to older GPUs, GPUs of other vendors, and Triton's interpreter on a CPU. benchmarks/triton_tune.py writes the
tables.

Tile sizes affect the order of summation. Results on GPUs with different tables can therefore differ in the last digits.
On one GPU, results are bitwise reproducible.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_REMEDY = "regenerate the table with python -m benchmarks.triton_tune"


class TileSizes:
    """Tile sizes of a kernel.

    Attributes:
        kernel: name of the kernel in the tables.
        bounds: names of the launch parameters on which the sizes depend.
        choices: allowed values of each size, ascending; `num_warps` and `num_stages` are Triton options.
        fixed: sizes that override the tables, for tests and benchmarks; None: use the tables.
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
        """Return the tile sizes for a launch.

        Args:
            x: Paddle or PyTorch tensor on the GPU of the launch.
            numbers: values of the launch parameters in `bounds`.

        Raises:
            ValueError: the table has no entry for these launch parameters, or contains an invalid entry.
        """
        assert numbers.keys() == set(self.bounds), f"{self.kernel} depends on {self.bounds}, not on {[*numbers]}"
        if self.fixed is not None:
            return dict(self.fixed)
        path = table_path(device_capability(x))
        key = path, *numbers.items()
        if key not in self._found:  # cached, because a lookup adds microseconds to a launch
            self._found[key] = self.lookup(path, numbers)
        return dict(self._found[key])

    def lookup(self, path: Path, numbers: dict[str, int]) -> dict[str, int]:
        """Return the tile sizes in a table for these launch parameters."""
        for entry in self.entries(path):
            if all(number <= entry.get(name, number) for name, number in numbers.items()):
                return {name: entry[name] for name in self.choices}
        raise ValueError(f"{path}: {self.kernel} has no sizes for {numbers}; {_REMEDY}")

    def entries(self, path: Path) -> list[dict[str, int]]:
        """Return the kernel's entries in a table.

        Raises:
            ValueError: the table lacks the kernel, or the tile sizes of an entry are not allowed.
        """
        if path not in self._entries:
            self._entries[path] = self._read_entries(path)
        return self._entries[path]

    def _read_entries(self, path: Path) -> list[dict[str, int]]:
        kernels = read_table(path)
        if self.kernel not in kernels:
            raise ValueError(f"{path}: the kernel {self.kernel} is missing; {_REMEDY}")
        for entry in (entries := kernels[self.kernel]["sizes"]):
            if not self.is_entry(entry):
                raise ValueError(f"{path}: {self.kernel}: the tile sizes {entry} are not allowed; {_REMEDY}")
        return entries

    def is_entry(self, entry: dict[str, int]) -> bool:
        """Return whether an entry has an allowed value for every tile size, and no unknown bound."""
        known = self.choices.keys() <= entry.keys() <= self.choices.keys() | set(self.bounds)
        return known and all(entry[name] in values for name, values in self.choices.items()) and self._allows(entry)

    def candidates(self, **bounds: int) -> list[dict[str, int]]:
        """Return all allowed combinations of sizes for an entry with these bounds."""
        products = itertools.product(*self.choices.values())
        sizes = [dict(zip(self.choices, values, strict=True)) for values in products]
        return [each for each in sizes if self._allows(bounds | each)]


def fills_threads(*sizes: str, **bounds: int) -> Callable[[dict[str, int]], bool]:
    """Return a function that checks whether a program with the tile sizes of an entry has 8 to 32 elements per thread.

    Args:
        sizes: names of the sizes whose product, times the bounds, is the number of elements of a program.
        bounds: launch parameters, each with its value for an entry without this bound.
    """

    def allows(entry: dict[str, int]) -> bool:
        elements = math.prod((bounds | entry)[name] for name in (*sizes, *bounds))
        return 8 <= elements // (32 * entry["num_warps"]) <= 32

    return allows


def shrunk(sizes: dict[str, int], name: str, count: int) -> dict[str, int]:
    """Limit the size `name` to `count` rounded up to a power of two, and reduce `num_warps` in proportion."""
    least = min(sizes[name], 1 << (count - 1).bit_length())
    return sizes | {name: least, "num_warps": max(1, sizes["num_warps"] * least // sizes[name])}


def device_capability(x: Any) -> int | None:
    """Return the compute capability of the tensor's GPU, such as 90; None if the device is not an NVIDIA GPU."""
    if _cuda() is None:
        return None
    # Only Paddle's tensors have `place`. Reading `place` is three times as fast as reading `device`.
    device = x.place.gpu_device_id() if hasattr(x, "place") else x.device.index
    return None if device is None else capability_of(device)


@functools.cache
def _cuda() -> ctypes.CDLL | None:
    """Return the CUDA driver library, or None without a GPU; Triton's driver would require PyTorch."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if cuda.cuInit(0) else cuda


@functools.cache
def capability_of(device: int) -> int | None:
    """Return the compute capability of the GPU with index `device`; None without an NVIDIA GPU."""
    cuda, parts = _cuda(), [ctypes.c_int(), ctypes.c_int()]
    if cuda is None:
        return None
    for attribute, part in zip((75, 76), parts, strict=True):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        error = cuda.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
        assert error == 0, f"CUDA error {error}: no compute capability of device {device}"
    return 10 * parts[0].value + parts[1].value


@functools.cache
def table_path(capability: int | None) -> Path:
    """Return the path of the table for a compute capability, or for the next lower capability that has a table.

    None selects the table of the lowest capability.
    """
    paths = {int(path.stem.removeprefix("sm_")): path for path in FOLDER.glob("sm_*.json")}
    older = [each for each in paths if capability is not None and each <= capability]
    return paths[max(older) if older else min(paths)]


@functools.cache
def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """Return the table in a file: `source` and `sizes` of each kernel.

    Raises:
        ValueError: the file is not a valid table.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}; {_REMEDY}") from error
    if not (isinstance(table, dict) and all(_is_kernel(value) for value in table.values())):
        raise ValueError(f"{path}: expected a JSON object with source and sizes of each kernel; {_REMEDY}")
    return table


def _is_kernel(value: Any) -> bool:
    if not (isinstance(value, dict) and value.keys() == {"source", "sizes"} and isinstance(value["sizes"], list)):
        return False
    return all(isinstance(each, dict) and all(type(size) is int for size in each.values()) for each in value["sizes"])
