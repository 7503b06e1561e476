"""State space duality, the recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).

A head has a matrix S [H, E] as its state, zero or an initial state before the first position of a document. At each
position, with decay g <= 0, step size d and input x:

    S <- e^g S + B (d x)^T
    y = S^T C

The skip connection of Mamba-2, D x, is not part of the op.

Shapes: T positions, R documents, G groups, N heads, H state dimension, E head dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.cpp.library import usable_in_fp32_or_bf16
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.state_space_duality.cpp import state_space_duality_cpp
from paddlenlp_ext.ops.state_space_duality.reference import state_space_duality_reference
from paddlenlp_ext.ops.state_space_duality.triton import state_space_duality_triton
from paddlenlp_ext.ops.triton_utils.launch import floats_on_gpu_with_triton

state_space_duality_op = DispatchedOp(
    "state space duality",
    cpp=(state_space_duality_cpp, usable_in_fp32_or_bf16),
    triton=(state_space_duality_triton, floats_on_gpu_with_triton),
    reference=state_space_duality_reference,
)


def state_space_duality(
    c_TGH: paddle.Tensor,
    b_TGH: paddle.Tensor,
    dx_TNE: paddle.Tensor,
    decay_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the outputs y [T, N, E] in the dtype of `dx_TNE`, and the states after the documents [R, N, H, E].

    A document with a parent starts from the state after the parent. The op is differentiable with respect to all
    tensors.

    Args:
        c_TGH: C of the documents of `layout`, one after another.
        b_TGH: B; group j serves the heads j N / G to (j + 1) N / G - 1.
        dx_TNE: inputs times step sizes, d x.
        decay_TN: logarithms of the decays, at most 0, float32.
        layout: documents of the batch.
        initial_RNHE: states before the documents, float32; None for zeros. The op ignores the states of documents
            with a parent.
        overwrites: whether a pass without gradients may overwrite `initial_RNHE` with the states after the documents.
    """
    run = state_space_duality_op.choose(dx_TNE)
    return run(c_TGH, b_TGH, dx_TNE, decay_TN, layout, initial_RNHE, overwrites)
