"""Triton kernels of attention under start rows, forward and backward; independent of Paddle and PyTorch.

FlashAttention 2 (Dao 2023, arXiv:2307.08691) with the options of score_options.py:

    x = q k^T                                   s = scale x,   or softcap tanh(scale x / softcap),   minus slope (i - j)
    p = exp(s - L)                              L = log(exp(sink) + sum(exp(s))),   saved
    o = p v                                     delta = sum(o do),   written by a kernel of its own
    dv = p^T do,  ds = p (do v^T - delta)       dx = ds scale (1 - tanh^2),   dq = dx k,   dk = dx^T q
    dsink = -sum(exp(sink - L) delta)

A query i sees the keys j <= i with i < start_row[j]. Programs walk lists of tiles (tile_lists.py): first those that
need no mask, then those that do. Tiles that are masked completely are in no list.

    kernel      program                                             walks
    forward     a tile of queries of one head                       keys
    deltas      a tile of queries of one head
    queries     a tile of queries of one head: dq                   keys
    keys        a tile of keys of one key-value head: dk, dv        query heads of the group, queries

Every sum has one program and a fixed order: there are no atomics. Sums are float32, exponentials are powers of two,
and L is stored in base 2. Products of float32 inputs are in TF32, as Paddle's are on a GPU.

Tested in Triton's interpreter (tests/ops/attention/test_triton.py).

Names: B batch, S positions, N query heads, K key-value heads, H channels of a head of q and k, E of v.
"""

LARGEST_ROW = 1024
"""Bytes of the channels of the widest head whose tiles fit shared memory."""
