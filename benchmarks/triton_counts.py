"""Memory and work of a training step counted without a GPU, on tensors that have shapes and no values.

Nothing is computed, so a model of any size fits. The counts cover PyTorch's operators on a CPU, whose attention
saves the same tensors as flash attention on a GPU, and the launches of this project's Triton kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import triton_torch

OVERWRITTEN = {
    "add_low_rank_kernel": (0,),
    "cross_entropy_kernel": (0,),
    "gate_backward_kernel": (1, 2),
}
"""Kernel -> indices of the tensors that the kernel reads and overwrites."""


@dataclass
class Counts:
    """Counts of a forward and a backward pass.

    Attributes:
        saved: bytes that the forward pass allocates and keeps for the backward pass.
        peak: largest sum of the bytes of all tensors that the passes allocate, gradients included.
        operators: operators of PyTorch that compute or copy, and launches of Triton kernels.
        launches: launches of Triton kernels.
        moved: bytes that operators and kernels read and write; an operator counts each distinct tensor once.
        launched_bytes: part of `moved` that Triton kernels read and write.
    """

    saved: int = 0
    peak: int = 0
    operators: int = 0
    launches: int = 0
    moved: int = 0
    launched_bytes: int = 0
    alive: int = field(default=0, repr=False)


def launch_bytes(name: str, tensors: list[Any]) -> int:
    """Return the bytes that a kernel reads and writes: each distinct tensor once, overwritten tensors twice."""
    distinct = {_identity(each): stored_bytes(each) for each in tensors}
    return sum(distinct.values()) + sum(stored_bytes(tensors[position]) for position in OVERWRITTEN.get(name, ()))


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; elements that an expansion repeats count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape)


class _Counter(TorchDispatchMode):
    """Count operators, the bytes that they read and write, and the storages that they allocate."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts, self.known = counts, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        given = {each.untyped_storage()._cdata for each in tensors}
        for each in made:
            if each.untyped_storage()._cdata not in given:
                self._track(each)
        if not _is_view(func):
            self.counts.operators += 1
            if func.overloadpacket.__name__ == "embedding":
                tensors = tensors[1:]  # an embedding reads only the rows that it writes
            distinct = {_identity(each): stored_bytes(each) for each in (*tensors, *made)}
            self.counts.moved += sum(distinct.values())
        return out

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.counts.alive += size
        self.counts.peak = max(self.counts.peak, self.counts.alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.counts.alive -= size


def _is_view(func: Any) -> bool:
    """Return whether an operator only allocates, or returns views or properties of its inputs."""
    if func.namespace == "prim":
        return True
    returns = func._schema.returns
    aliases = [each.alias_info for each in returns if each.alias_info is not None]
    is_view = bool(aliases) and not any(each.is_write for each in aliases)
    return is_view or func.overloadpacket.__name__.removeprefix("new_").startswith("empty") or "view" in func.name()


def count(loss: Callable[[], torch.Tensor]) -> Counts:
    """Return the counts of a loss and its backward pass, without running Triton kernels."""
    counts = Counts()

    def launch(kernel: Any, _: object, *arguments: Any, **__: Any) -> None:
        moved = launch_bytes(kernel.fn.__name__, [each for each in arguments if isinstance(each, torch.Tensor)])
        counts.launches += 1
        counts.operators += 1
        counts.launched_bytes += moved
        counts.moved += moved

    with mock.patch.object(triton_torch, "launch", launch), _Counter(counts):
        result = loss()
        counts.saved = counts.alive
        result.backward()
    return counts


def drop_values(model: torch.nn.Module) -> None:
    """Replace parameters and buffers with tensors of the same shapes, created in the current mode."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                    is_parameter = isinstance(old, torch.nn.Parameter)
                    tensors[name] = torch.nn.Parameter(new, old.requires_grad) if is_parameter else new
