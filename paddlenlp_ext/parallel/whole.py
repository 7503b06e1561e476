"""Cut tensors made whole again, one at a time and on the main process alone, while it writes them.

The main process asks for a tensor by its number, the others of its tensor group answer, until it says that it is done.
So the writer may read in any order, and no rank ever holds more than one whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist

from paddlenlp_ext.checkpoint.safetensors_writer import LazyTensor, as_lazy
from paddlenlp_ext.parallel.collectives import gathered
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.patience import meet
from paddlenlp_ext.parallel.tensor import sizes_of
from paddlenlp_ext.plan import cut_of

_DONE = -1


def write_whole(mesh: Mesh, tensors: Mapping[str, Any], write: Callable[[Mapping[str, LazyTensor]], None]) -> None:
    """Call `write` on the main process with every tensor as it would be on one; returns when it is done, everywhere.

    Args:
        mesh: the run's.
        tensors: this process's, by names that all processes share.
        write: reads what it writes.
    """
    meet()
    cut_names = [name for name, tensor in tensors.items() if cut_of(tensor) is not None]
    if mesh.is_main:
        lazy = {name: as_lazy(tensor) for name, tensor in tensors.items()}
        for number, name in enumerate(cut_names):
            read = partial(_ask, mesh, number, tensors[name])
            lazy[name] = LazyTensor(cut_of(tensors[name]).whole_shape(lazy[name].shape), lazy[name].dtype, read)
        try:
            write(lazy)
        finally:
            if cut_names:
                _tell(mesh, _DONE)
            meet()
        return
    helps = mesh.replicas.index == 0 and mesh.pipeline.index == 0
    while cut_names and (number := _tell(mesh, _DONE)) != _DONE:
        if helps:
            _whole(mesh, tensors[cut_names[number]])
    meet()


def _ask(mesh: Mesh, number: int, tensor: paddle.Tensor) -> Any:
    _tell(mesh, number)
    return _whole(mesh, tensor).numpy()


def _whole(mesh: Mesh, part: paddle.Tensor) -> paddle.Tensor:
    cut = cut_of(part)
    assert cut is not None
    return gathered(part.detach(), cut.axis, sizes_of(cut.size, mesh.tensor.size), mesh.tensor.group)


def _tell(mesh: Mesh, number: int) -> int:
    """What the main process says; its number goes to all."""
    if mesh.world.size == 1:
        return number
    told = paddle.to_tensor([number], dtype="int64")
    dist.broadcast(told, src=0, group=mesh.world.group)
    return int(told.item())
