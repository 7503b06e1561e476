"""Triton kernels of rotary position embedding fused with QK norms; independent of Paddle and PyTorch.

    rotation    (a, b) -> (a cos - b sin, b cos + a sin)        a, b: channels of a pair; backward: sin -> -sin
    norm        n w,    n = x / sqrt(mean(x^2) + epsilon),      mean over the channels of a head, w = offset + weight

One launch handles queries and keys. The grid is (tokens, blocks of heads). A program reads the angles of its tokens and
a few heads of either queries or keys. Arithmetic is float32. Without norms, the backward pass rotates by the negative
angles and does not need the inputs. With norms, the backward pass reads the inputs and recomputes their rms.

In the backward pass, each program sums the gradients of the norm weights over adjacent tokens, and a second kernel adds
these partial sums (ops/triton_utils/column_sums.py). With frozen weights, a program handles a single token.

Tested in Triton's interpreter (tests/ops/rope/test_triton.py).

Names: T tokens, N heads of a tensor, H head dimension, R rotated channels; first, second: channels of a pair; rest:
unrotated channels. NORM: "none", "before" or "after" the rotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes, fills_threads

# ELEMENTS: maximum number of elements per program. The number of heads per program is a power of two.
SIZES = TileSizes("rope", (), fills_threads("ELEMENTS"), ELEMENTS=(1024, 2048, 4096), num_warps=(1, 2, 4, 8))
BACKWARD_SIZES = TileSizes(
    "norm_rope_backward",
    (),
    fills_threads("ELEMENTS"),
    ELEMENTS=(512, 1024, 2048, 4096),
    PROGRAMS=(132, 264, 528),  # largest number of partial sums of a weight gradient in each block of heads
    num_warps=(1, 2, 4, 8),
)


class Heads(NamedTuple):
    """Queries or keys, [..., N, H] with contiguous channels.

    Attributes:
        tensor: Paddle or PyTorch tensor.
        token_stride, head_stride: distances between tokens and between heads, in elements.
    """

    tensor: Any
    token_stride: int
    head_stride: int


@triton.jit
def _load(
    x, is_head,
    INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Load both channels of each pair, [HEADS, HALF], and the unrotated channels [HEADS, REST].

    `x` holds pointers to the heads.
    """
    if INTERLEAVED:
        c = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(x + c, mask=is_head & (c < ROTARY_DIM), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], HALF, 2)))
    else:
        i = tl.arange(0, HALF)[None, :]
        mask = is_head & (i < ROTARY_DIM // 2)
        first = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x + ROTARY_DIM // 2 + i, mask=mask, other=0.0).to(tl.float32)
    rest = first  # placeholder without unrotated channels
    if REST > 0:
        j = ROTARY_DIM + tl.arange(0, REST)[None, :]
        rest = tl.load(x + j, mask=is_head & (j < HEAD_DIM), other=0.0).to(tl.float32)
    return first, second, rest


@triton.jit
def _store(
    out, first, second, rest, is_head,
    INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Store channels, given as `_load` returns them, at the pointers `out`."""
    dtype = out.dtype.element_ty
    if INTERLEAVED:
        c = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * HALF))
        tl.store(out + c, both.to(dtype), mask=is_head & (c < ROTARY_DIM))
    else:
        i = tl.arange(0, HALF)[None, :]
        mask = is_head & (i < ROTARY_DIM // 2)
        tl.store(out + i, first.to(dtype), mask=mask)
        tl.store(out + ROTARY_DIM // 2 + i, second.to(dtype), mask=mask)
    if REST > 0:
        j = ROTARY_DIM + tl.arange(0, REST)[None, :]
        tl.store(out + j, rest.to(dtype), mask=is_head & (j < HEAD_DIM))


@triton.jit
def _angles(cos, sin, t, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr):
    """Load the cosines and sines of token `t`, both [1, HALF]."""
    i = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + t * ROTARY_DIM + i, mask=i < ROTARY_DIM // 2, other=0.0).to(tl.float32)
    s = tl.load(sin + t * ROTARY_DIM + i, mask=i < ROTARY_DIM // 2, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _mean_product(a, b, rest_a, c, d, rest_c, HEAD_DIM: tl.constexpr, REST: tl.constexpr):
    """Return the mean over channels of the product of (a, b, rest_a) and (c, d, rest_c), [HEADS, 1]."""
    total = tl.sum(a * c + b * d, axis=1)
    if REST > 0:
        total += tl.sum(rest_a * rest_c, axis=1)
    return (total / HEAD_DIM)[:, None]


@triton.jit
def _rotate_block(
    x, weight, cos, sin, out, token_stride, head_stride, num_heads, block, epsilon, offset,
    NORM: tl.constexpr, BACK: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotate one block of heads of one token; normalize the heads before or after the rotation, depending on NORM."""
    t = tl.program_id(0).to(tl.int64)
    h = block * HEADS + tl.arange(0, HEADS)[:, None]
    is_head = h < num_heads
    first, second, rest = _load(
        x + t * token_stride + h * head_stride, is_head, INTERLEAVED, HEAD_DIM, ROTARY_DIM, HALF, REST
    )
    c, s = _angles(cos, sin, t, ROTARY_DIM, HALF)
    if BACK:
        s = -s
    if NORM == "after":
        first, second = first * c - second * s, second * c + first * s
    if NORM != "none":
        one = tl.arange(0, 1)[:, None]
        w_first, w_second, w_rest = _load(weight + one, one == 0, INTERLEAVED, HEAD_DIM, ROTARY_DIM, HALF, REST)
        inverse = tl.rsqrt(_mean_product(first, second, rest, first, second, rest, HEAD_DIM, REST) + epsilon)
        first, second, rest = (
            first * inverse * (w_first + offset),
            second * inverse * (w_second + offset),
            rest * inverse * (w_rest + offset),
        )
    if NORM != "after":
        first, second = first * c - second * s, second * c + first * s
    rows = out + (t * num_heads + h) * HEAD_DIM
    _store(rows, first, second, rest, is_head, INTERLEAVED, HEAD_DIM, ROTARY_DIM, HALF, REST)


@triton.jit
def rope_kernel(
    q,  # [T, N, H]
    k,  # [T, K, H]; a placeholder if num_k is 0
    q_weight,  # [H], not read if NORM is "none"
    k_weight,
    cos,  # [T, R]
    sin,
    q_out,  # [T, N, H], contiguous
    k_out,
    num_q,  # N
    num_k,  # K
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    epsilon,
    offset,
    NORM: tl.constexpr,
    BACK: tl.constexpr,  # whether to rotate by the negative angles
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,  # heads per program
    HEAD_DIM: tl.constexpr,  # H
    ROTARY_DIM: tl.constexpr,  # R
    HALF: tl.constexpr,  # R / 2 and H - R, rounded up to powers of two
    REST: tl.constexpr,
):
    """Rotate a block of query heads or key heads of one token."""
    block = tl.program_id(1)
    q_blocks = tl.cdiv(num_q, HEADS)
    if block < q_blocks:
        _rotate_block(
            q, q_weight, cos, sin, q_out, q_token_stride, q_head_stride, num_q, block,
            epsilon, offset, NORM, BACK, INTERLEAVED, HEADS, HEAD_DIM, ROTARY_DIM, HALF, REST,
        )  # fmt: skip
    else:
        _rotate_block(
            k, k_weight, cos, sin, k_out, k_token_stride, k_head_stride, num_k, block - q_blocks,
            epsilon, offset, NORM, BACK, INTERLEAVED, HEADS, HEAD_DIM, ROTARY_DIM, HALF, REST,
        )  # fmt: skip


@triton.jit
def _backward_block(
    gradient, x, weight, cos, sin, x_gradient, sums, token_stride, head_stride, num_heads, block,
    num_tokens, tokens, epsilon, offset,
    NORM: tl.constexpr, SUMS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Compute input gradients of a block of heads for consecutive tokens; write a partial weight gradient to `sums`."""
    h = block * HEADS + tl.arange(0, HEADS)[:, None]
    is_head = h < num_heads
    one = tl.arange(0, 1)[:, None]
    w_first, w_second, w_rest = _load(weight + one, one == 0, INTERLEAVED, HEAD_DIM, ROTARY_DIM, HALF, REST)
    sum_first = tl.zeros((HEADS, HALF), dtype=tl.float32)
    sum_second = tl.zeros((HEADS, HALF), dtype=tl.float32)
    sum_rest = tl.zeros((HEADS, REST if REST > 0 else HALF), dtype=tl.float32)
    first_token = tl.program_id(0) * tokens
    for token in range(tl.minimum(num_tokens - first_token, tokens)):
        t = first_token.to(tl.int64) + token
        c, s = _angles(cos, sin, t, ROTARY_DIM, HALF)
        rows = (t * num_heads + h) * HEAD_DIM
        g_first, g_second, g_rest = _load(gradient + rows, is_head, INTERLEAVED, HEAD_DIM, ROTARY_DIM, HALF, REST)
        first, second, rest = _load(
            x + t * token_stride + h * head_stride, is_head, INTERLEAVED, HEAD_DIM, ROTARY_DIM, HALF, REST
        )
        if NORM == "after":
            first, second = first * c - second * s, second * c + first * s
        else:
            g_first, g_second = g_first * c + g_second * s, g_second * c - g_first * s
        inverse = tl.rsqrt(_mean_product(first, second, rest, first, second, rest, HEAD_DIM, REST) + epsilon)
        first, second, rest = first * inverse, second * inverse, rest * inverse
        if SUMS:
            sum_first += g_first * first
            sum_second += g_second * second
            sum_rest += g_rest * rest
        g_first, g_second, g_rest = (
            g_first * (w_first + offset),
            g_second * (w_second + offset),
            g_rest * (w_rest + offset),
        )
        mean = _mean_product(g_first, g_second, g_rest, first, second, rest, HEAD_DIM, REST)
        g_first, g_second, g_rest = (
            (g_first - first * mean) * inverse,
            (g_second - second * mean) * inverse,
            (g_rest - rest * mean) * inverse,
        )
        if NORM == "after":
            g_first, g_second = g_first * c + g_second * s, g_second * c - g_first * s
        _store(x_gradient + rows, g_first, g_second, g_rest, is_head, INTERLEAVED, HEAD_DIM, ROTARY_DIM, HALF, REST)
    if SUMS:
        _store(
            sums + one,
            tl.sum(sum_first, axis=0)[None, :], tl.sum(sum_second, axis=0)[None, :], tl.sum(sum_rest, axis=0)[None, :],
            one == 0, INTERLEAVED, HEAD_DIM, ROTARY_DIM, HALF, REST,
        )  # fmt: skip


@triton.jit
def norm_rope_backward_kernel(
    q_gradient,  # gradient of the rotated queries [T, N, H], contiguous
    k_gradient,
    q,  # [T, N, H]
    k,  # [T, K, H]
    q_weight,  # [H]
    k_weight,
    cos,  # [T, R]
    sin,
    q_result,  # gradient of q [T, N, H], contiguous
    k_result,
    partials,  # float32 [blocks of q and k * programs, H], written only if SUMS
    num_q,  # N
    num_k,  # K
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    epsilon,
    offset,
    num_tokens,  # T
    tokens,  # tokens per program
    NORM: tl.constexpr,  # "before" or "after"
    SUMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,  # heads per program
    HEAD_DIM: tl.constexpr,  # H
    ROTARY_DIM: tl.constexpr,  # R
    HALF: tl.constexpr,  # R / 2 and H - R, rounded up to powers of two
    REST: tl.constexpr,
):
    """Compute input gradients of a block of heads for consecutive tokens, and a partial sum of the weight gradient."""
    block = tl.program_id(1)
    q_blocks = tl.cdiv(num_q, HEADS)
    sums = partials + (block * tl.num_programs(0) + tl.program_id(0)) * HEAD_DIM
    if block < q_blocks:
        _backward_block(
            q_gradient, q, q_weight, cos, sin, q_result, sums, q_token_stride, q_head_stride, num_q, block,
            num_tokens, tokens, epsilon, offset, NORM, SUMS, INTERLEAVED, HEADS, HEAD_DIM, ROTARY_DIM, HALF, REST,
        )  # fmt: skip
    else:
        _backward_block(
            k_gradient, k, k_weight, cos, sin, k_result, sums, k_token_stride, k_head_stride, num_k, block - q_blocks,
            num_tokens, tokens, epsilon, offset, NORM, SUMS, INTERLEAVED, HEADS, HEAD_DIM, ROTARY_DIM, HALF, REST,
        )  # fmt: skip


class _Launch:
    """Grid and compile-time constants of a launch."""

    def __init__(self, table: TileSizes, q: Any, k: Any, cos: Any) -> None:
        (*leading, num_q, head_dim), rotary_dim, sizes = q.shape, cos.shape[-1], table(q)
        self.tokens = math.prod(leading)
        self.num_heads = num_q, 0 if k is None else k.shape[-2]
        most = triton.next_power_of_2(max(self.num_heads))
        heads = max(1, min(most, sizes["ELEMENTS"] // triton.next_power_of_2(head_dim)))
        self.blocks = tuple(triton.cdiv(count, heads) for count in self.num_heads)
        rest = head_dim - rotary_dim
        self.constants = {
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "HALF": triton.next_power_of_2(rotary_dim // 2),
            "REST": triton.next_power_of_2(rest) if rest else 0,
            "num_warps": sizes["num_warps"],
        }
        # Tokens per program in a backward pass with weight gradients.
        self.tokens_per_program = max(1, triton.cdiv(self.tokens, sizes.get("PROGRAMS", self.tokens)))


def launch_rope(
    launch: Callable[..., None],
    q: Heads,
    k: Heads | None,
    tables: tuple[Any, Any],
    outs: tuple[Any, Any],
    interleaved: bool,
    *,
    norms: Any = None,
    back: bool = False,
) -> None:
    """Launch the rotation of queries and keys.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        q: [..., N, H].
        k: [..., K, H]; None: rotate only `q`.
        tables: cos and sin [..., R], contiguous.
        outs: contiguous output tensors in the shapes of `q` and `k`; without `k`, the second tensor is not written.
        interleaved: whether a pair consists of adjacent channels.
        norms: `rope.HeadNorms` with contiguous weights, or None.
        back: whether to rotate by the negative angles (backward pass).
    """
    sizes = _Launch(SIZES, q.tensor, None if k is None else k.tensor, tables[0])
    k = k or q
    weights = (q.tensor, k.tensor) if norms is None else (norms.q_weight, norms.k_weight)
    numbers = *q[1:], *k[1:], *_norm_numbers(norms)
    place = "none" if norms is None else "after" if norms.after_rotation else "before"
    constants = {"NORM": place, "BACK": back, "INTERLEAVED": interleaved, **sizes.constants}
    grid, heads = (sizes.tokens, sum(sizes.blocks)), sizes.num_heads
    launch(rope_kernel, grid, q.tensor, k.tensor, *weights, *tables, *outs, *heads, *numbers, **constants)


def partial_rows(q: Any, k: Any, cos: Any) -> tuple[int, int]:
    """Return the number of partial weight gradients of the query norm, and of the key norm."""
    sizes = _Launch(BACKWARD_SIZES, q, k, cos)
    programs = triton.cdiv(sizes.tokens, sizes.tokens_per_program)
    return sizes.blocks[0] * programs, sizes.blocks[1] * programs


def launch_norm_rope_backward(
    launch: Callable[..., None],
    gradients: tuple[Any, Any],
    q: Heads,
    k: Heads,
    tables: tuple[Any, Any],
    results: tuple[Any, Any],
    interleaved: bool,
    *,
    norms: Any,
    partials: Any = None,
) -> None:
    """Launch the backward pass of rotation and norms; the other arguments are described in `launch_rope`.

    Args:
        gradients: gradients of the rotated queries and keys, contiguous.
        results: gradients of `q` and `k`, contiguous; written.
        partials: float32 [sum of `partial_rows`, H], written: partial weight gradients of the query norm, then of the
            key norm. None: frozen weights.
    """
    sizes, sums = _Launch(BACKWARD_SIZES, q.tensor, k.tensor, tables[0]), partials is not None
    each = sizes.tokens_per_program if sums else 1
    tensors = *gradients, q.tensor, k.tensor, norms.q_weight, norms.k_weight, *tables, *results
    numbers = *sizes.num_heads, *q[1:], *k[1:], *_norm_numbers(norms), sizes.tokens
    place = "after" if norms.after_rotation else "before"
    constants = {"NORM": place, "SUMS": sums, "INTERLEAVED": interleaved, **sizes.constants}
    grid, partials = (triton.cdiv(sizes.tokens, each), sum(sizes.blocks)), partials if sums else results[0]
    launch(norm_rope_backward_kernel, grid, *tensors, partials, *numbers, each, **constants)


def _norm_numbers(norms: Any) -> tuple[float, float]:
    """Return epsilon and offset of the norms; without norms, return zeros, because the kernel needs floats."""
    return (0.0, 0.0) if norms is None else (float(norms.epsilon), float(norms.offset))
