"""Triton kernels of attention with a start-row mask, forward and backward; independent of Paddle and PyTorch.

FlashAttention 2 (Dao 2023, arXiv:2307.08691) with the options of score_options.py:

    x = q k^T                                   s = scale x,   or softcap tanh(scale x / softcap),   minus slope (i - j)
    p = exp(s - L)                              L = log(exp(sink) + sum(exp(s))),   saved
    o = p v                                     delta = sum(o do),   written by a separate kernel
    dv = p^T do,  ds = p (do v^T - delta)       dx = ds scale,   times 1 - tanh^2 with a soft-cap
    dq = dx k,  dk = dx^T q
    dsink = -sum(exp(sink - L) delta)

A query i attends to the keys j <= i with i < start_row[j]. Programs iterate over lists of tiles (tile_lists.py): first
tiles that need no mask, then partially masked tiles. Fully masked tiles are not listed.

    kernel      program                                             iterates over
    forward     a tile of queries of one head                       keys
    deltas      a tile of queries of one head
    queries     a tile of queries of one head: dq                   keys
    keys        a tile of keys of one key-value head: dk, dv        query heads of the group, queries

All sums have a fixed order, without atomics. Sums are float32, exponentials have base 2, and L is stored in base 2.
Matmuls of float32 inputs use TF32, like Paddle's matmuls on a GPU.

Tested in Triton's interpreter (tests/ops/attention/test_triton.py).

Names: B batch, S positions, N query heads, K key-value heads, H channels per head of q and k, E channels per head of v.
"""

LARGEST_ROW = 1024
"""Largest size in bytes of a head's channels for which tiles fit into shared memory."""
