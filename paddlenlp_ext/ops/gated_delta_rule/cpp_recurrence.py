"""Recurrences in C++ (csrc/recurrence.h), in chunks, each as a single autograd node.

The backward pass recomputes the states between the chunks. The final states are saved only if a document continues
another document. Inputs in bfloat16 are cast to float32.

Shapes: T positions, R documents, G key heads, N heads, H key dimension, E value dimension.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.cpp.library import empty, function, pointer
from paddlenlp_ext.ops.tensor_utils import contiguous, in_dtype, needs_grad


@dataclass(frozen=True)
class CppRecurrence:
    """Entry points of a recurrence, `<name>_forward` and `<name>_backward`.

    Attributes:
        name: name of the recurrence.
        sizes: name of the struct with the sizes.
        tensors: name of the struct with the addresses of the tensors.
        inputs: names of the input fields of `tensors`: q, k and v (or their counterparts), the decays, other inputs
            [T, N], and the initial states.
        output: name of the output field.
        constants: values of the last fields of the struct with the sizes.
        has_channel_decays: whether the decays are [T, N, H] instead of [T, N]; then each head has its own keys.
    """

    name: str
    sizes: str
    tensors: str
    inputs: tuple[str, ...]
    output: str
    constants: tuple[float, ...] = ()
    has_channel_decays: bool = False

    def __call__(
        self,
        inputs: Sequence[paddle.Tensor],
        layout: AttentionLayout,
        initial_RNHE: paddle.Tensor | None,
        overwrites: bool,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the outputs [T, N, E] in the dtype of v, and the states after the documents [R, N, H, E].

        Args:
            inputs: inputs in the order of the fields, without the initial states.
            layout: documents of the batch.
            initial_RNHE: states before the documents; None for zeros.
            overwrites: whether a pass without gradients overwrites `initial_RNHE` with the states after the documents.
        """
        dtype = inputs[2].dtype
        given = inputs if initial_RNHE is None else (*inputs, initial_RNHE)
        inputs = [contiguous(in_dtype(x, paddle.float32)) for x in given]
        sizes = self.sizes_of_documents(layout, self._checked_sizes(layout, [list(x.shape) for x in inputs]))
        if needs_grad(*inputs):
            o_TNE, final_RNHE = _Node.apply(self, sizes, *inputs)
        else:
            o_TNE, final_RNHE = _forward(self, sizes, inputs, overwrites and initial_RNHE is not None)
        return in_dtype(o_TNE, dtype), final_RNHE

    def _checked_sizes(self, layout: AttentionLayout, shapes: list[list[int]]) -> tuple[int, int, int, int]:
        """Check the shapes, because C++ loops would read past the end of tensors; return G, N, H and E."""
        (count, key_heads, key_dim), (_, heads, value_dim) = shapes[0], shapes[2]
        assert count == layout.num_positions and heads % key_heads == 0, f"{shapes}, {layout.num_positions} positions"
        states = [len(layout.documents()[0]), heads, key_dim, value_dim]
        decays = [count, heads, key_dim] if self.has_channel_decays else [count, heads]
        others = [[count, heads]] * (len(self.inputs) - 5)
        expected = [shapes[0], shapes[0], [count, heads, value_dim], decays, *others, states]
        assert key_heads == heads or not self.has_channel_decays, f"{key_heads} key heads, {heads} heads"
        assert shapes == expected[: len(shapes)], f"{shapes}, expected {expected}"
        return key_heads, heads, key_dim, value_dim

    def sizes_of_documents(self, layout: AttentionLayout, shape: tuple[int, int, int, int]) -> ctypes.Structure:
        """Return the struct with the sizes for the documents of a layout, and G, N, H and E."""
        return layout.cached((self.name, *shape), lambda: self._make_sizes(layout, shape))

    def _make_sizes(self, layout: AttentionLayout, shape: tuple[int, ...]) -> ctypes.Structure:
        arrays = (*layout.documents(), layout.parents())
        addresses = (array.ctypes.data for array in arrays)
        sizes = struct(self.sizes)(len(arrays[0]), *shape, *addresses, *self.constants)
        sizes.has_parents = bool((layout.parents() >= 0).any())
        sizes.arrays = arrays  # keeps the arrays alive; the struct holds only addresses
        return sizes

    def run(self, direction: str, sizes: ctypes.Structure, tensors: Mapping[str, paddle.Tensor]) -> None:
        """Call an entry point; fields missing from `tensors` are null."""
        addresses = struct(self.tensors)(**{field: pointer(x) for field, x in tensors.items()})
        function(f"{self.name}_{direction}")(ctypes.addressof(sizes), ctypes.addressof(addresses))


class _Node(PyLayer):
    @staticmethod
    def forward(ctx, recurrence, sizes, *inputs):
        o_TNE, final_RNHE = _forward(recurrence, sizes, inputs, overwrites=False)
        ctx.save_for_backward(*inputs, *([final_RNHE] if sizes.has_parents else []))
        ctx.recurrence, ctx.sizes, ctx.needs_grad = recurrence, sizes, [not x.stop_gradient for x in inputs]
        return o_TNE, final_RNHE

    @staticmethod
    def backward(ctx, o_gradient_TNE, final_gradient_RNHE):
        saved = ctx.saved_tensor()
        inputs = saved[: len(ctx.needs_grad)]
        named = dict(zip(ctx.recurrence.inputs, inputs, strict=False))
        gradients = {f"{name}_gradient": empty(x.shape) for name, x in named.items()}
        outputs = {
            f"{ctx.recurrence.output}_gradient": contiguous(o_gradient_TNE),
            "final_gradient": contiguous(final_gradient_RNHE),
        }
        if ctx.sizes.has_parents:
            outputs["final"] = saved[-1]
        ctx.recurrence.run("backward", ctx.sizes, {**named, **outputs, **gradients})
        return tuple(x if needed else None for x, needed in zip(gradients.values(), ctx.needs_grad, strict=True))


def _forward(
    recurrence: CppRecurrence, sizes: ctypes.Structure, inputs: Sequence[paddle.Tensor], overwrites: bool
) -> tuple[paddle.Tensor, paddle.Tensor]:
    k_TGH, v_TNE = inputs[1:3]
    o_TNE = empty(v_TNE.shape)
    shape = [sizes.documents, v_TNE.shape[1], k_TGH.shape[2], v_TNE.shape[2]]
    final_RNHE = inputs[-1] if overwrites else empty(shape)
    named = dict(zip(recurrence.inputs, inputs, strict=False))
    recurrence.run("forward", sizes, {**named, recurrence.output: o_TNE, "final": final_RNHE})
    return o_TNE, final_RNHE
