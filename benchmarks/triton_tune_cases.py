"""Launches of benchmarks/triton_tune.py: each kernel with sizes from a table, at the shapes of 8B models.

A new kernel is one function that returns its launches, and a line in `CASES`. The functions depend neither on PyTorch
nor on a GPU: a `Tensors` creates the tensors, and the results are tensors to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

from paddlenlp_ext.ops.triton_utils import column_sums
from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes
from tests.common.scripts import ROOT, bare_packages, load_script

with bare_packages("attention", "gated_delta_rule", "grouped_linear"):
    from paddlenlp_ext.ops.attention.kernels import backward as attention_backward
    from paddlenlp_ext.ops.attention.kernels import forward as attention_forward
    from paddlenlp_ext.ops.attention.kernels.inputs import Problem, Walk, sizes_for
    from paddlenlp_ext.ops.attention.kernels.tile_lists import tile_lists
    from paddlenlp_ext.ops.gated_delta_rule.kernels import backward as recurrence_backward
    from paddlenlp_ext.ops.gated_delta_rule.kernels import forward as recurrence_forward
    from paddlenlp_ext.ops.gated_delta_rule.kernels import unit_vectors, updates
    from paddlenlp_ext.ops.gated_delta_rule.kernels.chunk_lists import chunk_lists
    from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import Problem as Recurrence
    from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import chunk_size
    from paddlenlp_ext.ops.grouped_linear import kernels as grouped

OPS = ROOT / "paddlenlp_ext" / "ops"
EPSILON = 1e-6
Launch = Callable[..., None]
Run = Callable[[Launch], Sequence[Any]]
"""Function that runs a kernel on its own tensors and returns the results."""


# By path: the packages of the ops import Paddle.
rms_norm, rope, gates, losses, lora, adamw, unpack, packed, norm_linear, convolution = (
    load_script(OPS / op / "kernels.py")
    for op in (
        *("rms_norm", "rope", "gates", "linear_cross_entropy", "lora_linear", "adamw"),
        *("dequantize", "quantized_linear", "norm_linear", "causal_convolution"),
    )
)
adamw_tables = load_script(OPS / "adamw" / "launch_tables.py")
readers_of = load_script(OPS / "causal_convolution" / "readers.py").readers_of


class Tensors(Protocol):
    """Creator of tensors on a device. Dtypes have Triton's names; "x16" is the half-precision dtype of the device."""

    small: bool  # whether shapes are small and odd, for a check

    def random(self, *shape: int, dtype: str = "x16") -> Any:
        """Return normally distributed numbers; the n-th call returns the same numbers in every run."""

    def integers(self, high: int, *shape: int, dtype: str) -> Any:
        """Return random integers from 0 to high - 1."""

    def zeros(self, *shape: int, dtype: str = "x16") -> Any:
        """Return a tensor of zeros."""

    def array(self, numbers: np.ndarray) -> Any:
        """Return a tensor of these numbers."""

    def sum_rows(self, x: Any) -> Any:
        """Return the sums of the columns."""


class Case(NamedTuple):
    """A kernel's entries and launches.

    Attributes:
        sizes: the kernel's `TileSizes`.
        bounds: bounds of the entries, ascending; an empty dict: an entry without bounds.
        run: function that creates the tensors for given bounds, and returns the launch function.
        enough: fraction of a multiprocessor's maximum warps above which further warps do not help (`--compile`).
    """

    sizes: TileSizes
    bounds: Sequence[dict[str, int]]
    run: Callable[[Tensors, dict[str, int]], Run]
    enough: float


MEMORY_BOUND, PARTIAL_SUMS, TENSOR_CORES = 0.5, 0.25, 0.125
"""Values of `Case.enough`."""
WIDTHS = [{"columns": 1 << power} for power in range(6, 17)]
ELEMENT_SIZES = [{"element_size": 2}, {"element_size": 4}]
KEYS = [{**each, "keys": keys} for each in ELEMENT_SIZES for keys in (64, 128)]
ROWS_OF_HEADS = [{"row_bytes": size} for size in (128, 256, 512, 1024)]
ELEMENTS = 1 << 25
"""Elements of a matrix larger than the caches."""


def dtype_of(bounds: dict[str, int]) -> str:
    """Return the dtype of an entry's operands."""
    return {2: "x16", 4: "fp32"}[bounds["element_size"]]


def norm_forward(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Add and normalize rows."""
    columns = bounds["columns"] - (3 if tensors.small else 0)
    rows = 37 if tensors.small else ELEMENTS // columns
    x, addend, weight = (tensors.random(*shape) for shape in ((rows, columns), (rows, columns), (columns,)))
    total, out = tensors.zeros(rows, columns), tensors.zeros(rows, columns)

    def run(launch: Launch) -> Sequence[Any]:
        rms_norm.launch_forward(launch, x, columns, weight, out, EPSILON, 0.0, addend, total)
        return total, out

    return run


def norm_backward(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Compute the gradient of the sum, and partial sums of the weight gradient."""
    columns = bounds["columns"] - (3 if tensors.small else 0)
    rows = 37 if tensors.small else ELEMENTS // columns
    gradient, x, total_gradient = (tensors.random(rows, columns) for _ in range(3))
    weight, out = tensors.random(columns), tensors.zeros(rows, columns)
    partials = tensors.zeros(max(rms_norm.BACKWARD_SIZES.choices["PROGRAMS"]), columns, dtype="fp32")

    def run(launch: Launch) -> Sequence[Any]:
        numbers = (EPSILON, 0.0, total_gradient, partials)
        rms_norm.launch_backward(launch, gradient, x, columns, weight, out, *numbers)
        return out, tensors.sum_rows(partials)

    return run


def _heads(tensors: Tensors, count: int) -> tuple[Any, list[Any], tuple[Any, Any]]:
    """Return `rope.Heads` of the first pair, `count` pairs of queries and keys, and cos and sin tables."""
    batch, length, num_q, num_k, size = (2, 5, 5, 1, 20) if tensors.small else (2, 4096, 32, 8, 128)
    pairs = [[tensors.random(batch, length, heads, size) for heads in (num_q, num_k)] for _ in range(count)]
    tables = tensors.random(batch, length, size, dtype="fp32"), tensors.random(batch, length, size, dtype="fp32")
    strided = [rope.Heads(each, each.stride(1), each.stride(2)) for each in pairs[0]]
    return strided, pairs, tables


def rotation(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Rotate queries and keys."""
    heads, (_, outs), tables = _heads(tensors, 2)

    def run(launch: Launch) -> Sequence[Any]:
        rope.launch_rope(launch, *heads, tables, outs, False)
        return outs

    return run


def norm_rotation_backward(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Compute the gradients of normalized and rotated heads, and partial sums of the norms' weight gradients."""
    heads, (inputs, gradients, outs), tables = _heads(tensors, 3)
    size = inputs[0].shape[-1]
    weights = tensors.random(size), tensors.random(size)
    norms = SimpleNamespace(q_weight=weights[0], k_weight=weights[1], epsilon=EPSILON, offset=0.0, after_rotation=False)
    rows = sum(shape.shape[2] for shape in inputs) * max(rope.BACKWARD_SIZES.choices["PROGRAMS"])
    partials = tensors.zeros(rows, size, dtype="fp32")

    def run(launch: Launch) -> Sequence[Any]:
        options = {"norms": norms, "partials": partials}
        rope.launch_norm_rope_backward(launch, gradients, *heads, tables, outs, False, **options)
        return *outs, tensors.sum_rows(partials)

    return run


def gate(backward: bool) -> Callable[[Tensors, dict[str, int]], Run]:
    """Return the case of SwiGLU, or of its gradients."""

    def make(tensors: Tensors, bounds: dict[str, int]) -> Run:
        shape = (3, 8197) if tensors.small else (8192, 14336)
        matrices = [gates.Rows(tensors.random(*shape), shape[1]) for _ in range(5 if backward else 3)]
        launcher = gates.launch_backward if backward else gates.launch_forward

        def run(launch: Launch) -> Sequence[Any]:
            launcher(launch, *matrices, "silu")
            return [each.tensor for each in matrices[3 if backward else 2 :]]

        return run

    return make


def loss(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Compute losses, and overwrite the logits with their gradient."""
    rows, vocabulary = (3, 33001) if tensors.small else (2048, 128256)
    logits, targets = tensors.random(rows, vocabulary), tensors.integers(vocabulary, rows, dtype="i64")
    found, correct = tensors.zeros(rows, dtype="fp32"), tensors.zeros(rows, dtype="i32")

    def run(launch: Launch) -> Sequence[Any]:
        losses.launch_cross_entropy(launch, logits, targets, found, correct, True, None)
        return logits, found, correct

    return run


def one_pass(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Multiply rows with an unquantized or quantized weight and its low-rank update."""
    (outputs, inputs), codes, (levels, scales, *_), form = _packed(tensors)
    rows, rank, dtype = bounds.get("rows", 300 if tensors.small else 8192), bounds["rank"], dtype_of(bounds)
    if tensors.small:
        rows, rank = rows - 3, rank - 3
    x, a, b = (tensors.random(*shape, dtype=dtype) for shape in ((rows, inputs), (rank, inputs), (outputs, rank)))
    y, inner = tensors.zeros(rows, outputs, dtype=dtype), tensors.zeros(rows, rank, dtype=dtype)
    layer, kind = lora.Layer(codes, y, scales=scales), lora.Format(4, form["BLOCK"], levels=levels)
    if bounds.get("bits") == 0:
        layer, kind = lora.Layer(tensors.random(outputs, inputs, dtype=dtype), y), lora.Format()

    def run(launch: Launch) -> Sequence[Any]:
        lora.launch_lora_linear(launch, x, layer, kind, a, b, 2.0, inner)
        return y, inner

    return run


def add_low_rank(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Add a low-rank update in place."""
    rows, columns, rank = (70, 290, 5) if tensors.small else (8192, 14336, 16)
    dtype = dtype_of(bounds)
    y, inner, factor = (
        tensors.random(*shape, dtype=dtype) for shape in ((rows, columns), (rows, rank), (columns, rank))
    )

    def run(launch: Launch) -> Sequence[Any]:
        lora.launch_add_low_rank(launch, y, inner, factor, 2.0, (1, rank))
        return [y]

    return run


def low_rank_gradients(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Compute partial sums of the two products with the output gradient."""
    rows, columns = (70, 290) if tensors.small else (8192, 14336)
    rank, dtype = bounds["rank"] - (3 if tensors.small else 0), dtype_of(bounds)
    operands = [tensors.random(*shape, dtype=dtype) for shape in ((rows, columns), (rows, rank), (columns, rank))]

    def run(launch: Launch) -> Sequence[Any]:
        parts = lora.launch_low_rank_gradients(launch, lambda shape: tensors.zeros(*shape, dtype="fp32"), *operands)
        return [tensors.sum_rows(each) for each in parts]

    return run


def optimizer(in_8_bits: bool) -> Callable[[Tensors, dict[str, int]], Run]:
    """Return the case of a step over the factors of LoRA of an 8B model, in float32."""

    def make(tensors: Tensors, bounds: dict[str, int]) -> Run:
        counts = [15, 4997, 1] if tensors.small else [16 * 4096] * 300 + [16 * 14336] * 100
        made = []
        for count in counts:
            weight, gradient = (tensors.random(count, dtype="fp32") for _ in range(2))
            blocks = -(-count // 256)  # blocks of quantized moments, which are padded
            moment, length, num_scales = ("u8", 256 * blocks, 2) if in_8_bits else ("fp32", count, 0)
            moments = [tensors.zeros(length, dtype=moment) for _ in range(2)]
            scales = [tensors.zeros(blocks, dtype="fp32") for _ in range(num_scales)]
            made.append([weight, gradient, *moments, *scales])
        rows = []
        for weight, gradient, first, second, *scales in made:
            row = adamw_tables.TableRow(*(x.data_ptr() for x in (weight, gradient, first, second)), 0, weight.numel())
            rows.append(row._replace(**{f"scales{n}": x.data_ptr() for n, x in enumerate(scales, 1)}))
        arrays = (
            adamw_tables.table_of(rows),
            np.array([[0.999, 1e-3, 1e-8 if not in_8_bits else 10.0, 100.0]] * len(rows), np.float32),
            adamw_tables.block_map(counts, adamw.SPAN),
        )
        on_device, betas = [tensors.array(each) for each in arrays], (0.9, 0.1, 0.99, 0.01)
        kinds = {"WEIGHT": "float32", "GRADIENT": "float32", "ROUNDING": "none"}
        kinds["ALIGNMENT"] = min(row.alignment for row in rows)
        quantizers = []
        if in_8_bits:  # evenly spaced levels: only equality is checked
            levels = np.linspace(-1, 1, 256, dtype=np.float32)
            codes = np.full(1 << 18, 7, np.uint8)
            quantizers = [tensors.array(each) for each in (levels, levels, codes)] * 2

        def run(launch: Launch) -> Sequence[Any]:
            if in_8_bits:
                adamw.launch_adamw_8bit(launch, *on_device, quantizers, betas, 1e-8, kinds)
            else:
                adamw.launch_adamw(launch, *on_device, betas, kinds)
            return [weight for weight, *_ in made]

        return run

    return make


def sums(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Sum the columns of partial gradients."""
    rows, columns = (200, 45) if tensors.small else (264, 4096)
    partials, out = tensors.random(rows, columns, dtype="fp32"), tensors.zeros(columns)

    def run(launch: Launch) -> Sequence[Any]:
        column_sums.launch_column_sums(launch, partials, out)
        return [out]

    return run


def _packed(tensors: Tensors) -> tuple[tuple[int, int], Any, list[Any], dict[str, Any]]:
    """Return shape, codes, tables and format of a weight in nf4."""
    shape = (50, 192) if tensors.small else (14336, 4096)
    count = shape[0] * shape[1]
    codes, scales = tensors.integers(256, count // 2, dtype="u8"), tensors.random(count // 64, dtype="fp32")
    levels = tensors.random(16, dtype="fp32")
    return shape, codes, [levels, scales, levels, levels, levels], {"BLOCK": 64, "GROUP": 1, "NESTED": False}


def dequantize(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Dequantize a weight."""
    shape, codes, tables, form = _packed(tensors)
    out, count = tensors.zeros(*shape), shape[0] * shape[1]

    def run(launch: Launch) -> Sequence[Any]:
        sizes = unpack.DEQUANTIZE_SIZES(codes)
        grid, numbers = (-(-count // (2 * sizes["BYTES"])),), (count, count // 2, 0)
        launch(unpack.dequantize_kernel, grid, codes, *tables, out, *numbers, **sizes, **form)
        return [out]

    return run


def product_4bit(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Multiply one position with a quantized weight."""
    (outputs, inputs), codes, tables, form = _packed(tensors)
    x, y = tensors.random(1, inputs), tensors.zeros(1, outputs)

    def run(launch: Launch) -> Sequence[Any]:
        sizes = packed.PRODUCT_SIZES(codes)
        sizes["BLOCKS"] = sizes.pop("INPUTS") // form["BLOCK"]
        grid = -(-outputs // sizes["OUTPUTS"]), 1
        launch(packed.product_kernel, grid, x, codes, *tables, y, outputs, inputs, **sizes, **form)
        return [y]

    return run


def decoding_products(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Normalize a few positions and multiply them with a quantized weight."""
    (outputs, inputs), codes, (levels, scales, *_), form = _packed(tensors)
    positions, dtype = bounds["positions"], dtype_of(bounds)
    x, weight = tensors.random(positions, inputs, dtype=dtype), tensors.random(inputs, dtype=dtype)
    y = tensors.zeros(positions, outputs, dtype=dtype)
    layers = [norm_linear.Layer(codes, y, scales=scales)]

    def run(launch: Launch) -> Sequence[Any]:
        kind = norm_linear.Format(4, form["BLOCK"], levels=levels)
        norm_linear.launch_norm_linear(launch, x, layers, kind, weight, EPSILON)
        return [y]

    return run


def _experts(tensors: Tensors, rows: int) -> tuple[int, np.ndarray, int, int]:
    """Return groups, first rows, inputs and outputs of experts with `rows` rows each."""
    groups, inputs, outputs = (3, 70, 50) if tensors.small else (32, 2048, 1536)
    return groups, np.arange(groups + 1, dtype=np.int32) * rows, inputs, outputs


def grouped_product(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Multiply the rows of each expert with its weight."""
    each = bounds.get("rows", 150 if tensors.small else 512)
    groups, starts, inputs, outputs = _experts(tensors, each)
    x, weight = (
        tensors.random(*shape, dtype=dtype_of(bounds)) for shape in ((groups * each, inputs), (groups, outputs, inputs))
    )
    y = tensors.zeros(groups * each, outputs, dtype=dtype_of(bounds))

    def run(launch: Launch) -> Sequence[Any]:
        sizes = grouped.product_sizes(x, each, outputs)
        height = sizes["ROWS"]
        tiles = [
            (group, first, min(first + height, starts[group + 1]))
            for group in range(groups)
            for first in range(starts[group], starts[group + 1], height)
        ]
        on_device = tensors.array(np.array(tiles, np.int32))
        grouped.launch_product(launch, x, weight, y, on_device, (inputs, 1), sizes)
        return [y]

    return run


def grouped_weight_gradient(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Compute the weight gradient of each expert."""
    each = 40 if tensors.small else 512
    groups, starts, inputs, outputs = _experts(tensors, each)
    x, gradient = (tensors.random(groups * each, size, dtype=dtype_of(bounds)) for size in (inputs, outputs))
    out, on_device = tensors.zeros(groups, outputs, inputs, dtype=dtype_of(bounds)), tensors.array(starts)

    def run(launch: Launch) -> Sequence[Any]:
        grouped.launch_weight_gradient(launch, gradient, x, out, on_device)
        return [out]

    return run


def attention(kernel: str) -> Callable[[Tensors, dict[str, int]], Run]:
    """Return the case of an attention kernel over packed documents."""

    def make(tensors: Tensors, bounds: dict[str, int]) -> Run:
        head_dim, documents = bounds["row_bytes"] // 2, (9, 26) if tensors.small else (4096, 700, 1300, 2000, 96)
        heads, kv_heads, length = *((2, 1) if tensors.small else (32, 8)), sum(documents)
        q, gradient, out = (tensors.random(1, length, heads, head_dim) for _ in range(3))
        k, v, k_out, v_out = (tensors.random(1, length, kv_heads, head_dim) for _ in range(4))
        log_sums, deltas = (tensors.random(1, heads, length, dtype="fp32") for _ in range(2))
        rows = np.repeat(np.cumsum(documents), documents).astype(np.int32)[None]
        problem, saved = Problem(q, k, v, tensors.array(rows), head_dim**-0.5), (gradient, log_sums, deltas)

        def walk(table: TileSizes, of_keys: bool = False) -> Walk:
            sizes = sizes_for(table, problem)
            return Walk(sizes, *map(tensors.array, tile_lists(rows, sizes["QUERIES"], sizes["KEYS"], of_keys)))

        def run(launch: Launch) -> Sequence[Any]:
            if kernel == "forward":
                attention_forward.launch_forward(launch, problem, own, out, log_sums)
                return out, log_sums
            if kernel == "deltas":
                attention_backward.launch_deltas(launch, problem, out, gradient, log_sums, deltas, None)
                return (deltas,)
            if kernel == "queries":
                attention_backward.launch_query_gradient(launch, problem, own, saved, out)
                return (out,)
            attention_backward.launch_key_gradients(launch, problem, own, saved, (k_out, v_out))
            return k_out, v_out

        table = {"queries": attention_backward.QUERY_SIZES, "keys": attention_backward.KEY_SIZES}
        own = walk(table.get(kernel, attention_forward.SIZES), of_keys=kernel == "keys")
        return run

    return make


def causal_convolution(kernel: str) -> Callable[[Tensors, dict[str, int]], Run]:
    """Return the case of a kernel of the convolution of one document, with 4 taps and the channels of Qwen3.5-4B."""

    def make(tensors: Tensors, bounds: dict[str, int]) -> Run:
        (count, channels), num_taps = (50, 200) if tensors.small else (8192, 8192), 4
        rows = np.arange(count)[:, None] - np.arange(num_taps)[::-1]
        rows = np.where(rows < 0, count, rows)
        taps, starts, entries = (tensors.array(each.astype(np.int32)) for each in (rows, *readers_of(rows, count)))
        x, gradient, out = (tensors.random(count, channels) for _ in range(3))
        weight = tensors.random(num_taps, channels)

        def run(launch: Launch) -> Sequence[Any]:
            if kernel == "forward":
                convolution.launch_forward(launch, x, weight, None, taps, out)
            elif kernel == "input":
                convolution.launch_input_gradient(launch, gradient, weight, starts, entries, out)
            else:
                partials = tensors.zeros(convolution.num_parts(gradient), num_taps, channels, dtype="fp32")
                convolution.launch_weight_gradient(launch, gradient, x, taps, partials)
                return [tensors.sum_rows(partials)]
            return [out]

        return run

    return make


def recurrence(kernel: str) -> Callable[[Tensors, dict[str, int]], Run]:
    """Return the case of a kernel of the gated delta rule over packed documents, with values of 128 channels."""

    def make(tensors: Tensors, bounds: dict[str, int]) -> Run:
        key_dim, dtype = 24 if tensors.small else bounds["keys"], dtype_of(bounds)
        groups, heads, value_dim = (1, 2, 20) if tensors.small else (16, 32, 128)
        lengths = np.array([9, 70] if tensors.small else [4096, 700, 1300, 2000, 96])
        starts, count = np.cumsum(lengths) - lengths, int(lengths.sum())
        size = chunk_size(bounds["element_size"], int(lengths.max()))
        lists = chunk_lists(starts, lengths, np.full(len(lengths), -1), size).converted(tensors.array)
        chunks, documents = lists.chunks.shape[0], len(lengths)
        q, k = (tensors.random(count, groups, key_dim, dtype=dtype) for _ in range(2))
        v, u, of_o, of_u, of_v, o = (tensors.random(count, heads, value_dim, dtype=dtype) for _ in range(6))
        decay, beta = (tensors.array(np.full((count, heads), x, np.float32)) for x in (-0.1, 0.5))
        problem = Recurrence(q, k, v, decay, beta, None, lists)
        states, of_states = (tensors.random(chunks, *problem.state, dtype=dtype) for _ in range(2))
        final, of_final, of_initial = (tensors.random(documents, *problem.state, dtype="fp32") for _ in range(3))
        w = tensors.random(count, heads, key_dim, dtype=dtype)
        inverse, of_qk, of_kk = (tensors.random(chunks, heads, size, size, dtype=dtype) for _ in range(3))
        parts = recurrence_backward.num_parts(problem)
        of_q, of_k = (tensors.zeros(parts, count, groups, key_dim, dtype=dtype) for _ in range(2))
        of_decay, of_beta = (tensors.zeros(count, heads, dtype="fp32") for _ in range(2))

        def run(launch: Launch) -> Sequence[Any]:
            if kernel == "updates":
                updates.launch_updates(launch, problem, inverse, w, u)
                return inverse, w, u
            if kernel == "states":
                recurrence_forward.launch_states(launch, problem, u, w, states, final)
                return states, final
            if kernel == "outputs":
                recurrence_forward.launch_outputs(launch, problem, u, states, o)
                return (o,)
            if kernel == "state gradients":
                gradients = of_o, of_final, of_states, of_u, of_initial
                recurrence_backward.launch_state_gradients(launch, problem, w, *gradients)
                return of_states, of_u, of_initial
            saved = states, of_states, of_o
            if kernel == "value gradients":
                gradients = of_v, of_decay, of_beta, of_qk, of_kk
                recurrence_backward.launch_value_gradients(launch, problem, (u, inverse, *saved, of_u), gradients)
                return gradients
            saved = u, *saved, of_v, of_qk, of_kk
            recurrence_backward.launch_key_gradients(launch, problem, saved, (of_q, of_k))
            return of_q, of_k

        return run

    return make


def scaled_vectors(tensors: Tensors, bounds: dict[str, int]) -> Run:
    """Scale vectors to norm 1."""
    columns = bounds.get("columns", 256) - (3 if tensors.small else 0)
    x = tensors.random(*((37, 2) if tensors.small else (8192, 16)), columns)
    out = tensors.zeros(*x.shape)

    def run(launch: Launch) -> Sequence[Any]:
        unit_vectors.launch_unit_vectors(launch, x, out, 1.0, EPSILON)
        return [out]

    return run


CASES = {
    case.sizes.kernel: case
    for case in (
        Case(rms_norm.FORWARD_SIZES, WIDTHS, norm_forward, MEMORY_BOUND),
        Case(rms_norm.BACKWARD_SIZES, WIDTHS, norm_backward, PARTIAL_SUMS),
        Case(rope.SIZES, [{}], rotation, MEMORY_BOUND),
        Case(rope.BACKWARD_SIZES, [{}], norm_rotation_backward, PARTIAL_SUMS),
        Case(gates.FORWARD_SIZES, [{}], gate(False), MEMORY_BOUND),
        Case(gates.BACKWARD_SIZES, [{}], gate(True), MEMORY_BOUND),
        Case(losses.SIZES, [{}], loss, MEMORY_BOUND),
        Case(
            lora.ONE_PASS_SIZES,
            [
                {**bits, **each, "rank": rank, **rows}
                for bits in ({"bits": 0}, {})
                for each in ELEMENT_SIZES
                for rank in (16, lora.LARGEST_RANK)
                for rows in ({"rows": 16}, {"rows": 64}, {})
            ],
            one_pass,
            TENSOR_CORES,
        ),
        Case(lora.ADD_SIZES, ELEMENT_SIZES, add_low_rank, MEMORY_BOUND),
        Case(
            lora.GRADIENT_SIZES,
            [{**each, "rank": rank} for each in ELEMENT_SIZES for rank in (16, 32)],
            low_rank_gradients,
            TENSOR_CORES,
        ),
        Case(adamw.SIZES, [{}], optimizer(False), MEMORY_BOUND),
        Case(adamw.SIZES_8BIT, [{}], optimizer(True), MEMORY_BOUND),
        Case(column_sums.SIZES, [{}], sums, MEMORY_BOUND),
        Case(unpack.DEQUANTIZE_SIZES, [{}], dequantize, MEMORY_BOUND),
        Case(packed.PRODUCT_SIZES, [{}], product_4bit, TENSOR_CORES),
        Case(
            norm_linear.SIZES,
            [{**each, "positions": positions} for each in ELEMENT_SIZES for positions in (8, 16)],
            decoding_products,
            TENSOR_CORES,
        ),
        Case(
            grouped.PRODUCT_SIZES,
            [{**each, **rows} for each in ELEMENT_SIZES for rows in ({"rows": 16}, {"rows": 32}, {"rows": 64}, {})],
            grouped_product,
            TENSOR_CORES,
        ),
        Case(convolution.FORWARD_SIZES, [{}], causal_convolution("forward"), MEMORY_BOUND),
        Case(convolution.INPUT_GRADIENT_SIZES, [{}], causal_convolution("input"), MEMORY_BOUND),
        Case(convolution.WEIGHT_GRADIENT_SIZES, [{}], causal_convolution("weight"), PARTIAL_SUMS),
        Case(updates.SIZES, KEYS, recurrence("updates"), TENSOR_CORES),
        Case(recurrence_forward.STATE_SIZES, KEYS, recurrence("states"), TENSOR_CORES),
        Case(recurrence_forward.OUTPUT_SIZES, KEYS, recurrence("outputs"), TENSOR_CORES),
        Case(recurrence_backward.STATE_SIZES, KEYS, recurrence("state gradients"), TENSOR_CORES),
        Case(recurrence_backward.VALUE_SIZES, KEYS, recurrence("value gradients"), TENSOR_CORES),
        Case(recurrence_backward.KEY_SIZES, KEYS, recurrence("key gradients"), TENSOR_CORES),
        Case(unit_vectors.SIZES, [{"columns": size} for size in (64, 128, 256)], scaled_vectors, MEMORY_BOUND),
        Case(grouped.WEIGHT_GRADIENT_SIZES, ELEMENT_SIZES, grouped_weight_gradient, TENSOR_CORES),
        Case(attention_forward.SIZES, ROWS_OF_HEADS, attention("forward"), TENSOR_CORES),
        Case(attention_backward.DELTA_SIZES, ROWS_OF_HEADS[1:], attention("deltas"), MEMORY_BOUND),
        Case(attention_backward.QUERY_SIZES, ROWS_OF_HEADS, attention("queries"), TENSOR_CORES),
        Case(attention_backward.KEY_SIZES, ROWS_OF_HEADS, attention("keys"), TENSOR_CORES),
    )
}
