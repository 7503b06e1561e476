"""Gradient clipping: the squared norm of many tensors as one vector, and their scaling."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence

import paddle

from paddlenlp_ext.ops.cpu.library import function, pointer, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp, Implementation


def sum_of_squares_reference(tensors: Sequence[paddle.Tensor]) -> float:
    """Sum the squares of all values in fp32."""
    # Not paddle.dot: on the CPU it accumulates sequentially, an error of 4 % for an embedding's 28 million values.
    return float(paddle.stack([tensor.astype("float32").square().sum() for tensor in tensors]).sum())


def sum_of_squares_cpp(tensors: Sequence[paddle.Tensor]) -> float:
    """Sum the squares in double precision (csrc/gradients.cpp); the bits do not depend on the thread count."""
    tensors = [tensor.contiguous() for tensor in tensors]
    total = ctypes.c_double()
    function("sum_of_squares")(pointers(tensors), sizes(tensors), len(tensors), ctypes.byref(total))
    return total.value


def scale_reference(tensors: Sequence[paddle.Tensor], factor: float) -> None:
    """Scale each tensor in turn, in place."""
    for tensor in tensors:
        tensor.scale_(factor)


def scale_cpp(tensors: Sequence[paddle.Tensor], factor: float) -> None:
    """Scale all contiguous tensors in one call, and the others with the reference."""
    scale_reference([tensor for tensor in tensors if not tensor.is_contiguous()], factor)
    contiguous = [tensor for tensor in tensors if tensor.is_contiguous()]
    function("scale_tensors")(pointers(contiguous), sizes(contiguous), len(contiguous), factor)


def pointers(tensors: Sequence[paddle.Tensor]) -> ctypes.Array:
    """Return the tensors' addresses as a C array."""
    return (ctypes.c_void_p * len(tensors))(*map(pointer, tensors))


def sizes(tensors: Sequence[paddle.Tensor]) -> ctypes.Array:
    """Return the tensors' numbers of values as a C array of int64."""
    return (ctypes.c_int64 * len(tensors))(*(math.prod(tensor.shape) for tensor in tensors))


sum_of_squares_op = DispatchedOp(
    "sum_of_squares", native=(sum_of_squares_cpp, usable), reference=sum_of_squares_reference
)
scale_op = DispatchedOp("scale", native=(scale_cpp, usable), reference=scale_reference)


def sum_of_squares(tensors: Iterable[paddle.Tensor]) -> float:
    """Return the sum of squares of all values of all tensors; 0 without tensors."""
    return sum(backend(group) for backend, group in _by_backend(sum_of_squares_op, tensors))


def scale_(tensors: Iterable[paddle.Tensor], factor: float) -> None:
    """Multiply all tensors by a number, in place."""
    for backend, group in _by_backend(scale_op, tensors):
        backend(group, factor)


def _by_backend(
    op: DispatchedOp, tensors: Iterable[paddle.Tensor]
) -> Iterable[tuple[Implementation, list[paddle.Tensor]]]:
    """Group tensors by the backend that `op` chooses for them."""
    groups: dict[Implementation, list[paddle.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(op.choose(tensor), []).append(tensor)
    return groups.items()
