"""Calls of Paddle's GPU-only operators, appended to a static program.

Appending an operator runs the checks of its arguments and its inference of shapes and dtypes, which are those of a GPU
build. No kernel is run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.base import core
from paddle.incubate.autograd.phi_ops_map import op_info

import paddlenlp_ext
from paddlenlp_ext.ops.attention import flashmask
from paddlenlp_ext.ops.attention.document_layout import AttentionLayout
from paddlenlp_ext.ops.quantized_linear import weight_only
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from tests.common.gpu import pretend_gpu
from tests.common.marks import needs_cpp
from tests.ops.gpu.static_program import static_program

pytestmark = [needs_cpp, pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")]
PACKAGE = Path(paddlenlp_ext.__file__).parent
AMPERE, HOPPER = (8, 0), (9, 0)
LAYOUTS = {
    "packed": AttentionLayout.from_documents([[5, 7], [12]]),
    "windowed": AttentionLayout.from_documents([[5, 7], [12]], 4),
    "shared prompt": AttentionLayout.from_documents([[5, 4, 3], [12]], None, [[None, 0, 0], [None]]),
    "shared prompt, windowed": AttentionLayout.from_documents([[5, 4, 3], [12]], 4, [[None, 0, 0], [None]]),
}
FORMATS = [("weight_only_int8", 128), ("weight_only_int4", 128), ("weight_only_int4", 64)]
GPU_ONLY = ("flashmask_attention", "flashmask_attention_v2", "weight_only_linear")
ALIASES = r"paddle\.incubate|functional\.flash_attention|scaled_dot_product_attention|sdp_kernel"
"""Functions that call GPU-only operators of other names."""
OTHER_KERNEL_NAMES = {"embedding", "one_hot"}
"""Functions whose operator has a kernel for the CPU under another name."""
Change = Callable[[Any], Any]


@pytest.fixture
def program() -> Iterator[Any]:
    """Yield the static program to which operators are appended."""
    with static_program(GPU_ONLY) as program:
        yield program


def break_argument(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, argument: str, change: Change) -> None:
    """Change one argument of the calls of a function of Paddle."""
    function = getattr(module, name)
    signature = inspect.signature(function)

    def broken(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**{**bound.arguments, argument: change(bound.arguments[argument])})

    monkeypatch.setattr(module, name, broken)


def data(name: str, *shape: int, dtype: str = "bfloat16") -> Any:
    value = paddle.static.data(name, list(shape), dtype)
    value.stop_gradient = False
    return value


def operators(program: Any) -> set[str]:
    return {op.name().removeprefix("pd_op.") for op in program.global_block().ops}


def attend(
    layout: AttentionLayout, value_dim: int = 64, prefix: int = 0, dtype: str = "bfloat16"
) -> tuple[Any, list[Any]]:
    """Append attention with 4 heads of 64 channels; return the result and the inputs."""
    # A copy, because plans of a layout are cached and belong to one program.
    layout = AttentionLayout(layout.document_lengths, layout.window, layout.document_parents)
    sizes = {"q": (2, 12, 4, 64), "k": (2, 12, 2, 64), "v": (2, 12, 2, value_dim)}
    inputs = [data(name, *shape, dtype=dtype) for name, shape in sizes.items()]
    before = (data("k_prefix", prefix, 2, 64), data("v_prefix", prefix, 2, value_dim)) if prefix else None
    return flashmask.flashmask_attention(*inputs, layout, 0.3, before), inputs


@pytest.mark.parametrize(
    ("capability", "operator"), [(AMPERE, "flashmask_attention"), (HOPPER, "flashmask_attention_v2")]
)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_flashmask_attention_passes_inference_forward_and_backward(program, monkeypatch, layout, capability, operator):
    pretend_gpu(monkeypatch, capability)
    out, inputs = attend(layout)
    assert operator in operators(program)
    assert (list(out.shape), out.dtype) == ([2, 12, 4, 64], paddle.bfloat16)
    gradients = paddle.static.gradients([out], inputs)
    assert f"{operator}_grad" in operators(program)
    assert [list(gradient.shape) for gradient in gradients] == [list(x.shape) for x in inputs]


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_flashmask_attention_with_prefix_and_narrow_values_passes_inference(program, monkeypatch, capability):
    pretend_gpu(monkeypatch, capability)
    out, _ = attend(LAYOUTS["packed"], value_dim=44, prefix=3)
    assert list(out.shape) == [2, 12, 4, 44]


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_flashmask_attention_in_float16_passes_inference(program, monkeypatch, capability):
    pretend_gpu(monkeypatch, capability)
    out, inputs = attend(LAYOUTS["packed"], dtype="float16")
    gradients = paddle.static.gradients([out], inputs)
    assert {out.dtype, *(gradient.dtype for gradient in gradients)} == {paddle.float16}


def multiply(algo: str, block: int, dtype: str = "bfloat16") -> Any:
    """Append the product of x [2, 3, 128] and a quantized weight [64, 128]."""
    num_codes = 64 * 128 if algo == "weight_only_int8" else 64 * 128 // 2
    codes = data("codes", num_codes, dtype="int8" if algo == "weight_only_int8" else "uint8")
    scales = data("scales", 64 * 128 // block, dtype="float32")
    weight = QuantizedWeight(algo, (64, 128), block, codes, scales, kernel_cache={"fits kernel": True})
    return weight_only.weight_only_linear(data("x", 2, 3, 128, dtype=dtype), weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("algo", "block"), FORMATS)
def test_weight_only_linear_passes_inference(program, monkeypatch, algo: str, block: int, dtype: str):
    pretend_gpu(monkeypatch)
    y = multiply(algo, block, dtype)
    assert {"weight_quantize", "weight_only_linear"} <= operators(program)
    assert (list(y.shape), y.dtype) == ([2, 3, 64], getattr(paddle, dtype))


@pytest.mark.parametrize(
    ("capability", "argument", "change", "message"),
    [
        (AMPERE, "query", lambda q: q.astype("float32"), "op: flashmask_attention, input: q, q.dtype: float32"),
        (AMPERE, "causal", lambda causal: 0.3, r"flashmask_attention\(\): argument \(position 7\) must be bool"),
        (AMPERE, "softmax_scale", lambda scale: 0.3, "does not support setting softmax_scale"),
        (AMPERE, "startend_row_indices", lambda rows: rows.astype("int64"), "dtype must be paddle.int32"),
        (AMPERE, "startend_row_indices", lambda rows: rows[:1], "must be equal to batch_size"),
        (HOPPER, "query", lambda q: q.astype("float32"), "op: flashmask_attention_v2, input: q, q.dtype: float32"),
        (HOPPER, "causal", lambda causal: 0.3, r"flashmask_attention_v2\(\): argument \(position 7\) must be bool"),
        (HOPPER, "softmax_scale", str, r"flashmask_attention_v2\(\): argument \(position 6\) must be double"),
    ],
)
def test_flashmask_attention_with_broken_argument_is_caught(
    program, monkeypatch, capability: tuple[int, int], argument: str, change: Change, message: str
):
    pretend_gpu(monkeypatch, capability)
    break_argument(monkeypatch, flashmask.F, "flashmask_attention", argument, change)
    with pytest.raises((AssertionError, TypeError, ValueError), match=message):
        attend(LAYOUTS["packed"])


@pytest.mark.parametrize(
    ("name", "argument", "change", "message"),
    [
        ("weight_quantize", "x", lambda x: x.astype("float32"), "op: weight_quantize, input: x, x.dtype: float32"),
        ("weight_quantize", "x", lambda x: x.unsqueeze(0), "x_dims.size"),
        ("weight_quantize", "algo", lambda algo: "int4", "The algo must be in"),
        ("weight_only_linear", "weight_scale", lambda scale: scale.T, "weight_scale_dims"),
        ("weight_only_linear", "weight", lambda weight: weight.T, "w_dims"),
        ("weight_only_linear", "weight_dtype", lambda dtype: f"weight_only_{dtype}", "must be 'int8' or 'int4'"),
        ("weight_only_linear", "weight_scale", lambda scale: None, r"argument \(position 4\) must be Value"),
    ],
)
def test_weight_only_linear_with_broken_argument_is_caught(
    program, monkeypatch, name: str, argument: str, change: Change, message: str
):
    pretend_gpu(monkeypatch)
    break_argument(monkeypatch, weight_only.quant, name, argument, change)
    with pytest.raises((TypeError, ValueError), match=message):
        multiply("weight_only_int4", 64)


def test_every_gpu_only_function_of_paddle_is_checked_here():
    """Collect the calls of functions of Paddle whose operator of this name has no kernel for the CPU."""
    called: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert not re.search(ALIASES, source), f"{path}: add its functions to the calls that are collected here"
        called.update(re.findall(r"\b(?:F|quant|_C_ops)\.(\w+)", source))
    with_cpu_kernel = core._get_all_register_op_kernels("phi")
    gpu_only = {name for name in called if name in op_info and name not in with_cpu_kernel}
    assert gpu_only - OTHER_KERNEL_NAMES == {"flashmask_attention", "weight_only_linear"}
