"""Training blocks in C++ against the layers op by op: outputs, gradients, recomputation, and the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models import decoder_layers, training_blocks
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.cpp import bf16, library
from paddlenlp_ext.ops.training_blocks import AdaptedLinear
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.common.marks import needs_cpp
from tests.common.models import ODD_SIZES, TINY_DELTA, TINY_LLAMA, slow_decays
from tests.common.same_bits import assert_same_bits

pytestmark = needs_cpp
needs_bf16 = pytest.mark.skipif(bf16.unavailable_reason() is not None, reason="needs bfloat16 products")

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TINY_LLAMA,
    "odd sizes, biases": {"model_type": "qwen2", **ODD_SIZES},
    "window": {**TINY_LLAMA, "model_type": "mistral", "sliding_window": 5},
    "interleaved": {"model_type": "glm", **ODD_SIZES, "head_dim": 12, "attention_bias": True},
    "QK norms": {"model_type": "qwen3", **ODD_SIZES, "head_dim": 10},
    "QK norms after rotation": {"model_type": "hunyuan_v1_dense", **ODD_SIZES, "head_dim": 10},
    "geglu, offset": {"model_type": "gemma", **ODD_SIZES, "head_dim": 10},
}
DELTA = {**ODD_SIZES, **TINY_DELTA}
DELTA_LINEARS = "in_proj", "out_proj", "self_attn", "mlp", "layernorm"
IDS = np.random.default_rng(0).integers(1, 60, (2, 37))
DOCUMENTS = [[10, 27], [1, 36]]
LONG_IDS = np.random.default_rng(0).integers(1, 60, (1, 601))


def make_model(config: dict[str, Any], rank: int = 3, quantized: bool = False, dtype: str = "float32", **options: Any):
    """Return a model with LoRA whose factors are not zero."""
    model = AutoModelForCausalLM.from_config(config, seed=1, dtype=dtype)
    if quantized:
        quantize_linears(model, QuantizationConfig(algo="nf4"))
    return with_random_values(get_peft_model(model, LoRAConfig(rank=rank, lora_alpha=2 * rank, **options)))


def with_random_values(model):
    """Set all trained parameters to random values, and return the model in training mode."""
    draw = np.random.default_rng(5)
    for _, parameter in model.named_parameters():
        if not parameter.stop_gradient:
            values = draw.normal(0, 0.1, parameter.shape) + (parameter.ndim == 1)
            parameter.set_value(paddle.to_tensor(values.astype("float32")).astype(parameter.dtype))
    model.train()
    return model


def make_trained_model(config: dict[str, Any], dtype: str = "float32", names: Sequence[str] = ("",)):
    """Return a model that trains the parameters of the decoder layers whose names contain one of `names`."""
    model = with_random_values(AutoModelForCausalLM.from_config(config, seed=1, dtype=dtype))
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = ".layers." not in name or not any(each in name for each in names)
    return model


def outputs_and_gradients(model, in_bf16: bool = False, ids=IDS, documents=DOCUMENTS, parents=None) -> list[np.ndarray]:
    """Return the logits and the gradients of the trained parameters."""
    families = {} if parents is None else {"document_parents": parents}
    with bf16.bf16_matmuls() if in_bf16 else nullcontext():
        logits = model(paddle.to_tensor(ids), document_lengths=documents, **families)
    logits.square().mean().backward()
    trained = [each for _, each in sorted(model.named_parameters()) if not each.stop_gradient]
    gradients = [each.grad.astype("float32").numpy() for each in trained]
    for each in trained:
        each.clear_gradient(set_to_zero=False)
    return [logits.numpy(), *gradients]


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Return the names of the blocks that run in C++."""
    names = []

    def recorded(name: str, function):
        def run(*arguments, **options):
            names.append(name)
            return function(*arguments, **options)

        return run

    for name in ("attention_block", "delta_net_block", "feed_forward_block"):
        monkeypatch.setattr(training_blocks, name, recorded(name, getattr(training_blocks, name)))
    return names


def op_by_op(monkeypatch, run):
    """Return the result of `run` without blocks."""
    with monkeypatch.context() as patch:
        for name in ("run_mixer_block", "run_feed_forward_block"):
            patch.setattr(decoder_layers, name, lambda *arguments: None)
        return run()


BLOCKS = ("attention_block", "feed_forward_block") * 2
DELTA_BLOCKS = ("delta_net_block", "feed_forward_block", "attention_block", "feed_forward_block")


def check_equal(model, monkeypatch, ran, tolerance: float = 3e-6, blocks: Sequence[str] = BLOCKS, **options) -> None:
    ran.clear()
    expected = op_by_op(monkeypatch, lambda: outputs_and_gradients(model, **options))
    assert ran == []
    found = outputs_and_gradients(model, **options)
    assert ran == [*blocks]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * abs(other).max())


@pytest.mark.parametrize("config", CONFIGS)
def test_blocks_equal_layers_op_by_op(config, monkeypatch, ran):
    check_equal(make_model(CONFIGS[config]), monkeypatch, ran)


@pytest.mark.parametrize("config", CONFIGS)
def test_blocks_with_trained_weights_equal_layers_op_by_op(config, monkeypatch, ran):
    """Gradients of QK norms and key biases are small differences of large terms."""
    check_equal(make_trained_model(CONFIGS[config]), monkeypatch, ran, tolerance=2e-5)


@pytest.mark.parametrize("names", [["norm"], ["bias"], ["up_proj", "o_proj"], ["k_proj", "k_norm", "down_proj"]])
def test_blocks_with_some_trained_parameters_equal_layers_op_by_op(names, monkeypatch, ran):
    model = make_trained_model({**CONFIGS["QK norms"], "attention_bias": True}, names=names)
    check_equal(model, monkeypatch, ran, tolerance=2e-5)


def test_blocks_with_low_rank_updates_of_trained_weights_equal_layers_op_by_op(monkeypatch, ran):
    model = make_model(CONFIGS["odd sizes, biases"])
    for name, parameter in model.named_parameters():
        if any(each in name for each in ("q_proj", "down_proj", "input_layernorm")):
            parameter.stop_gradient = False
    check_equal(model, monkeypatch, ran)


@pytest.mark.parametrize("changes", [{}, {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2}])
def test_blocks_of_gated_delta_nets_and_gated_attention_equal_layers_op_by_op(changes, monkeypatch, ran):
    """Decays are slow, so that a state which leaks into the next document changes all of its positions."""
    model = slow_decays(make_model({**DELTA, **changes}))
    check_equal(model, monkeypatch, ran, blocks=DELTA_BLOCKS, tolerance=2e-5)
    check_equal(model, monkeypatch, ran, blocks=DELTA_BLOCKS, tolerance=2e-5, ids=LONG_IDS, documents=[[250, 1, 350]])


def test_blocks_of_a_gated_delta_net_with_trained_linear_layers_equal_layers_op_by_op(monkeypatch, ran):
    model = slow_decays(make_trained_model(DELTA, names=DELTA_LINEARS))
    check_equal(model, monkeypatch, ran, blocks=DELTA_BLOCKS, tolerance=2e-5)
    check_equal(model, monkeypatch, ran, blocks=DELTA_BLOCKS, tolerance=2e-5, ids=LONG_IDS, documents=[[250, 1, 350]])


def test_block_of_a_gated_delta_net_with_child_documents_equals_layers_op_by_op(monkeypatch, ran):
    model = slow_decays(make_model(DELTA))
    parents = {"documents": [[2, 15, 5, 1, 14]], "parents": [[None, 0, 0, None, 3]]}
    check_equal(model, monkeypatch, ran, blocks=DELTA_BLOCKS, tolerance=2e-5, ids=IDS[:1], **parents)


def test_documents_in_one_pack_return_the_bits_of_separate_passes(ran):
    model = slow_decays(make_model(DELTA))
    packed = outputs_and_gradients(model, ids=LONG_IDS, documents=[[250, 351]])[0][0]
    alone = [outputs_and_gradients(model, ids=part, documents=None)[0][0] for part in np.split(LONG_IDS, [250], axis=1)]
    assert_same_bits(packed, np.concatenate(alone))
    assert ran == [*DELTA_BLOCKS] * 3


def test_blocks_of_a_gated_delta_net_return_equal_bits_with_any_number_of_threads(monkeypatch, ran):
    model, before, found = slow_decays(make_model(DELTA)), library.threads(), []
    for threads in (1, 2, 3):
        library.set_threads(threads)
        try:
            logits, *_ = outputs_and_gradients(model, ids=LONG_IDS, documents=[[250, 351]])
        finally:
            library.set_threads(before)
        found.append(logits)
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("make", [make_model, make_trained_model])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_blocks_of_many_positions_equal_layers_op_by_op(threads, make, monkeypatch, ran):
    """With one thread, a thread computes several chunks of positions."""
    before = library.threads()
    library.set_threads(threads)
    try:
        check_equal(make(CONFIGS["QK norms"]), monkeypatch, ran, ids=LONG_IDS, documents=[[250, 351]])
    finally:
        library.set_threads(before)


@pytest.mark.parametrize("rank", [1, 8, 40])
def test_blocks_of_any_rank_equal_layers_op_by_op(rank, monkeypatch, ran):
    check_equal(make_model(CONFIGS["llama"], rank), monkeypatch, ran)


@pytest.mark.parametrize(("targets", "skipped"), [(["q_proj", "v_proj"], 0), (["down_proj"], 1)])
def test_blocks_with_some_adapters_equal_layers_op_by_op(targets, skipped, monkeypatch, ran):
    """The attention of the first layer needs no gradients if only feed-forwards have adapters."""
    model = make_model(CONFIGS["odd sizes, biases"], target_modules=targets)
    check_equal(model, monkeypatch, ran, blocks=BLOCKS[skipped:])


def test_pass_without_gradients_gives_the_bits_of_layers_op_by_op(monkeypatch, ran):
    """A model with frozen weights then gives the same logits as a model whose weights are trained."""
    model = make_model(CONFIGS["llama"])

    def logits():
        with paddle.no_grad():
            return model(paddle.to_tensor(IDS), document_lengths=DOCUMENTS).numpy()

    np.testing.assert_array_equal(logits(), op_by_op(monkeypatch, logits))
    assert ran == []


def test_blocks_over_quantized_weights_equal_layers_op_by_op(monkeypatch, ran):
    check_equal(make_model(CONFIGS["odd sizes, biases"], quantized=True), monkeypatch, ran)


@needs_bf16
@pytest.mark.parametrize("config", [CONFIGS["llama"], DELTA])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("rank", [8, 40])
def test_blocks_in_bf16_are_as_close_to_float32_as_layers_op_by_op(config, quantized, rank, monkeypatch, ran):
    check_distance(make_model(config, rank, quantized), monkeypatch, ran, DELTA_BLOCKS if config is DELTA else BLOCKS)


@needs_bf16
@pytest.mark.parametrize("config", ["odd sizes, biases", "QK norms", "geglu, offset"])
def test_blocks_with_trained_weights_in_bf16_are_as_close_to_float32_as_layers_op_by_op(config, monkeypatch, ran):
    check_distance(make_trained_model(CONFIGS[config]), monkeypatch, ran, BLOCKS)


@needs_bf16
def test_blocks_of_a_gated_delta_net_with_trained_linear_layers_in_bf16_are_as_close_to_float32(monkeypatch, ran):
    model = slow_decays(make_trained_model(DELTA, names=DELTA_LINEARS))
    check_distance(model, monkeypatch, ran, DELTA_BLOCKS)


def check_distance(model, monkeypatch, ran, blocks: Sequence[str]) -> None:
    exact = op_by_op(monkeypatch, lambda: outputs_and_gradients(model))
    separate = op_by_op(monkeypatch, lambda: outputs_and_gradients(model, in_bf16=True))
    found = outputs_and_gradients(model, in_bf16=True)
    assert ran == [*blocks]
    for one, other, true in zip(found, separate, exact, strict=True):
        assert 0 < np.linalg.norm(one - true) <= 1.3 * np.linalg.norm(other - true)


@needs_bf16
@pytest.mark.parametrize("make", [make_model, make_trained_model])
def test_blocks_over_bf16_weights_equal_layers_op_by_op_within_rounding(make, monkeypatch, ran):
    """Several roundings by 2^-9 in other places."""
    check_equal(make(CONFIGS["llama"], dtype="bfloat16"), monkeypatch, ran, tolerance=2.0**-5)


def test_gradients_of_two_passes_add_up(ran):
    """The second pass adds to gradients in memory that the first pass wrote."""
    model = make_trained_model(CONFIGS["odd sizes, biases"])
    _, *expected = outputs_and_gradients(model)
    model(paddle.to_tensor(IDS), document_lengths=DOCUMENTS).square().mean().backward()
    _, *found = outputs_and_gradients(model)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, 2 * other)


@pytest.mark.parametrize("make", [make_model, make_trained_model])
@pytest.mark.parametrize("in_bf16", [False, pytest.param(True, marks=needs_bf16)])
def test_blocks_in_recomputed_layers_return_the_same_bits(in_bf16, make, monkeypatch, ran):
    model = make(CONFIGS["llama"])
    next(each for name, each in model.named_parameters() if "embed_tokens" in name).stop_gradient = False
    expected = outputs_and_gradients(model, in_bf16)
    model.enable_recompute(RecomputePlan())
    ran.clear()
    found = outputs_and_gradients(model, in_bf16)
    assert len(ran) == 8, "the blocks of two layers run twice"
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_feed_forward_of_some_positions_runs_op_by_op(monkeypatch, ran):
    model = make_model(CONFIGS["llama"])
    positions = paddle.to_tensor([3, 40])

    def hidden():
        states = model.hidden_states(paddle.to_tensor(IDS), document_lengths=DOCUMENTS, loss_positions=positions)
        return paddle.gather(states.flatten(0, 1), positions).numpy()

    expected = op_by_op(monkeypatch, hidden)
    np.testing.assert_allclose(hidden(), expected, rtol=0, atol=3e-6 * abs(expected).max())
    assert ran == ["attention_block", "feed_forward_block", "attention_block"]


def test_layers_that_the_blocks_do_not_cover_run_op_by_op_and_log_why(caplog, monkeypatch, ran):
    training_blocks._log.cache_clear()
    model = make_model(CONFIGS["llama"])
    layers = [layer for layer in model.sublayers() if isinstance(layer, decoder_layers.DecoderLayer)]
    layers[0].self_attn.v_proj.register_forward_post_hook(lambda layer, inputs, output: output)
    layers[1].mlp.down_proj.dropout = 0.5
    with caplog.at_level(logging.DEBUG, logger="paddlenlp_ext"):
        outputs_and_gradients(model)
    assert ran == ["feed_forward_block", "attention_block"]
    reasons = [record.getMessage() for record in caplog.records if "op by op" in record.getMessage()]
    assert [reason.partition(":")[0] for reason in reasons] == ["attention runs op by op", "feed-forward runs op by op"]
    assert ["v_proj" in reasons[0], "down_proj" in reasons[1]] == [True, True]


@pytest.mark.parametrize("factor", [paddle.ones([8, 3]).t(), paddle.ones([3, 8], "bfloat16")])
def test_layer_with_a_factor_of_another_layout_or_dtype_runs_op_by_op(factor):
    linear = AdaptedLinear(paddle.ones([8, 8]), bias=None, a=factor, b=paddle.ones([8, 3]), scaling=1.0)
    assert training_blocks._linear_reason(linear) == "a bias or a factor is not float32 or not contiguous"


@pytest.mark.parametrize("name", ["A_log", "conv1d.weight", "norm.weight"])
def test_gated_delta_net_with_a_trained_parameter_runs_op_by_op(name, monkeypatch, ran):
    model = make_model(DELTA)
    parameters = dict(model.model.layers[0].linear_attn.named_parameters())
    parameters[name].stop_gradient = False
    check_equal(model, monkeypatch, ran, blocks=DELTA_BLOCKS[1:], tolerance=2e-5)


def test_adapter_other_than_lora_runs_op_by_op(monkeypatch, ran):
    model = get_peft_model(AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1), DoRAConfig(rank=2))
    outputs_and_gradients(model)
    assert ran == []
