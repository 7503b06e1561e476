"""Gather sharded tensors to the main process, one tensor at a time, while the main process writes a file.

    main process                       other processes
    broadcast the tensor index     ->  receive the index
    all-gather or receive          <-  all-gather shards, or broadcast the full tensor
    ... until every tensor is written, then broadcast _DONE

The writer may read the tensors in any order. Each process holds at most one full tensor in addition to its shards. A
single process with the same weights writes identical files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist

from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.parallel.collectives import all_gather_cat
from paddlenlp_ext.parallel.gloo import gloo_barrier
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.shard_parameters import shard_sizes
from paddlenlp_ext.sharding_spec import Shard, full_shape, is_materialized, shard_of

_MAIN, _DONE = 0, -1


@dataclass(frozen=True)
class _TensorSource:
    """Global rank that provides a tensor, and the unsharded shape and the dtype of the tensor."""

    holder: int
    shape: tuple[int, ...]
    dtype: str


def save_gathered(mesh: Mesh, tensors: Mapping[str, Any], write: Callable[[Mapping[str, LazyTensor]], None]) -> None:
    """Call `write` on the main process with all unsharded tensors; all processes return when `write` has finished.

    Args:
        mesh: device mesh of the run.
        tensors: tensors and shards that this process holds, by name in the unsharded model.
        write: function that takes the unsharded tensors by name. Each tensor is gathered when `write` reads it.
    """
    gloo_barrier()
    own = {name: tensor for name, tensor in tensors.items() if is_materialized(tensor)}
    sources = _tensor_sources(mesh, own)
    names = sorted(sources)
    if mesh.is_main:
        lazy = {}
        for number, name in enumerate(names):
            read = partial(_request, mesh, number, sources[name], own.get(name))
            lazy[name] = LazyTensor(sources[name].shape, sources[name].dtype, read)
        try:
            write(lazy)
        finally:
            _broadcast_number(mesh, _DONE)
            gloo_barrier()
        return
    while (number := _broadcast_number(mesh, _DONE)) != _DONE:
        _answer(mesh, sources[names[number]], own.get(names[number]))
    gloo_barrier()


def _tensor_sources(mesh: Mesh, own: Mapping[str, Any]) -> dict[str, _TensorSource]:
    """Return the source of each tensor: the lowest rank that holds the full tensor or its first shard."""
    local = []
    if mesh.data.index == 0 and mesh.tensor.index == 0:
        local = [(name, _TensorSource(mesh.world.index, full_shape(t), as_lazy(t).dtype)) for name, t in own.items()]
    by_process: list[list[tuple[str, _TensorSource]]] = []
    dist.all_gather_object(by_process, local, group=mesh.world.group)
    sources: dict[str, _TensorSource] = {}
    for of_one_process in by_process:
        for name, source in of_one_process:
            sources.setdefault(name, source)
    return sources


def _request(mesh: Mesh, number: int, source: _TensorSource, own: Any) -> Any:
    """Tell the other processes which tensor to gather, and return the tensor as a NumPy array on the main process."""
    _broadcast_number(mesh, number)
    if source.holder == _MAIN:
        shard = shard_of(own)
        return as_lazy(own).read() if shard is None else gather_shards(mesh, own, shard).numpy()
    return _broadcast(mesh, source, None).numpy()


def _answer(mesh: Mesh, source: _TensorSource, own: Any) -> None:
    """Call the collectives that gather the requested tensor, and send the tensor or shard that this process holds."""
    full, shard = None, shard_of(own)
    if source.holder in mesh.holders(shard):
        full = own if shard is None else gather_shards(mesh, own, shard)
    if source.holder != _MAIN:
        _broadcast(mesh, source, full if source.holder == mesh.world.index else None)


def _broadcast(mesh: Mesh, source: _TensorSource, full: paddle.Tensor | None) -> paddle.Tensor:
    """Broadcast a tensor from its source to all processes.

    A point-to-point send from the source to the main process would desynchronize the gloo group.
    """
    if full is None:
        values = paddle.empty(list(source.shape), getattr(paddle, source.dtype))
    else:
        values = full.detach().contiguous()
    if values.size:
        dist.broadcast(values, src=source.holder, group=mesh.world.group)
    return values


def gather_shards(mesh: Mesh, part: paddle.Tensor, shard: Shard) -> paddle.Tensor:
    """Gather the full tensor from its shards on the ranks `mesh.holders(shard)`, which must all call this function.

    Gradients do not pass through the result.
    """
    part, sizes = part.detach(), shard_sizes(shard.size, mesh.tensor.size)
    if shard.by_experts:
        own = sizes[mesh.tensor.index]
        part = all_gather_cat(part, shard.axis, shard_sizes(own, mesh.experts.size), mesh.experts.group)
    return part if mesh.tensor.size == 1 else all_gather_cat(part, shard.axis, sizes, mesh.tensor.group)


def _broadcast_number(mesh: Mesh, number: int) -> int:
    """Broadcast an integer from the main process and return it."""
    tensor = paddle.to_tensor([number], dtype="int64")
    dist.broadcast(tensor, src=_MAIN, group=mesh.world.group)
    return int(tensor.numpy()[0])
