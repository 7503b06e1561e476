"""Compile the kernels of attention for GPUs without one; test_compile_fused.py runs a part of it.

    python -m tests.ops.compile_attention            heads of 128 channels in bfloat16, for Hopper and for 8.6
    python -m tests.ops.compile_attention --all      other heads and float32 too, and for 8.0

Prints the lines of compile_fused.py, each with the bytes of a head's channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import triton

from paddlenlp_ext.ops.attention.kernels import backward, forward
from paddlenlp_ext.ops.attention.kernels.inputs import Problem, Walk, sizes_for
from paddlenlp_ext.ops.triton_utils import tile_sizes
from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes
from tests.ops.compile_fused import AMPERE, HOPPER, Compiler, Sized

SERVER_AMPERE = 80
TYPES = {
    **dict.fromkeys(("sinks", "slopes", "log_sums", "deltas", "sink_parts"), "*fp32"),
    **dict.fromkeys(("start_rows", "indices", "counts"), "*i32"),
    **dict.fromkeys(("inner", "outer", "scale"), "fp32"),
}
INPUTS = ("q", "k", "v", "out", "gradient", "q_gradient", "k_gradient", "v_gradient")
LENGTH, HEADS, KV_HEADS = 8192, 16, 8


def compile_attention(capability: int, head_dim: int, element_size: int, softcap: float | None, sinks: bool) -> None:
    """Compile all kernels for heads of a size."""
    types = TYPES | dict.fromkeys(INPUTS, "*bf16" if element_size == 2 else "*fp32")
    q, k = (Sized(1, LENGTH, heads, head_dim, element_size=element_size) for heads in (HEADS, KV_HEADS))
    problem = Problem(q, k, k, None, head_dim**-0.5, softcap, None, Sized(HEADS) if sinks else None)
    compiler = Compiler(capability, types)
    tile_sizes.device_capability = lambda x: capability

    def launch(kernel: triton.JITFunction, *arguments: object, **constants: object) -> None:
        print(head_dim * element_size, end=" ")
        compiler(kernel, *arguments, **constants)

    def walk(table: TileSizes) -> Walk:
        return Walk(sizes_for(table, problem), Sized(1, 64, 128), None)

    own: Callable[..., None] = launch
    saved = (None,) * 3
    forward.launch_forward(own, problem, walk(forward.SIZES), None, None)
    backward.launch_deltas(own, problem, None, None, None, None, None)
    backward.launch_query_gradient(own, problem, walk(backward.QUERY_SIZES), saved, None)
    backward.launch_key_gradients(own, problem, walk(backward.KEY_SIZES), saved, (None, None))


if __name__ == "__main__":
    if sys.argv[1:] == ["--all"]:
        for capability in (HOPPER, SERVER_AMPERE, AMPERE):
            for head_dim in (64, 96, 128, 256, 512):
                compile_attention(capability, head_dim, 2, 50.0, True)
            for head_dim in (32, 64, 128, 256):
                compile_attention(capability, head_dim, 4, None, False)
    else:
        for capability in (HOPPER, AMPERE):
            compile_attention(capability, 128, 2, 50.0, True)
