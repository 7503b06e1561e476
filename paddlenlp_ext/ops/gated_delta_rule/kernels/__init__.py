"""Triton kernels of chunked recurrences; independent of Paddle and PyTorch.

chunked_recurrence.py has the formulas. A program of the kernels of states computes the chunks of a document one after
another. Programs of the other kernels compute one chunk.

    kernel            module       writes                                           a program computes
    updates           updates.py   T, W = T beta e^c K, T beta V (delta rule only)  a chunk and a head
    states            forward.py   states before the chunks, U = T beta V - W S0    a document and a head
    outputs           forward.py   O                                                a chunk and a head
    state gradients   backward.py  gradients of the states after the chunks, dU     a document and a head
    value gradients   backward.py  dV, gradients of decays, beta, Q K^T and K K^T   a chunk and a head
    key gradients     backward.py  dQ, dK                                           a chunk, some heads of a group

The backward pass first launches the kernels of updates and states again (passes.py). Documents that continue a parent
are launched after their parents, and before their parents in the backward pass.

Sums, decays and the states of a document are float32. Operands of products have the dtype of the queries; float32
operands are multiplied in TF32, as Paddle does on a GPU. States between chunks are stored in the dtype of the queries.

Tested in Triton's interpreter (tests/ops/gated_delta_rule/test_triton.py).

Names: T positions, R documents, G key heads, N heads, H key dimension, E value dimension, M chunks, C positions of a
chunk.
"""

LARGEST_KEY = 128
"""Largest key dimension; tiles of wider keys do not fit into registers."""
