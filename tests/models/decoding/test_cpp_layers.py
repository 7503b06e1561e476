"""Compare the C++ decoding step of several layers with the layers one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.continuous_kv_cache import SlotCache
from paddlenlp_ext.generation.logits_processors import on_host
from paddlenlp_ext.generation.padded_kv_cache import BLOCK, KVCache
from paddlenlp_ext.generation.prefill_and_decode import forward, prefill, step
from paddlenlp_ext.models import decoder
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoding import cpp_layers
from paddlenlp_ext.ops.cpp import bf16, library
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears, quantized_layers
from tests.common.models import TINY_DELTA, TINY_MAMBA, TINY_SINGLE_BLOCKS, TINY_TWO_MIXERS, slow_decays
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model

pytestmark = pytest.mark.skipif(library.unavailable_reason() is not None, reason="needs the C++ library")
PROMPTS = random_prompts((21, 5, 9))
ONE_GROUP = {"mamba_d_ssm": 35, "mamba_n_heads": 7, "mamba_d_head": 5, "mamba_n_groups": 1, "mamba_d_state": 19}
WIDE_HEADS = {"mamba_d_ssm": 102, "mamba_n_heads": 6, "mamba_n_groups": 3, "time_step_limit": [0.3, 0.9]}
MAMBA_MODELS: dict[str, dict[str, Any]] = {
    "one_group_of_odd_heads": {**TINY_MAMBA, **ONE_GROUP},
    "heads_wider_than_a_vector_with_limited_steps": {**TINY_MAMBA, **WIDE_HEADS},
    "no_bias_of_the_convolution": {
        **TINY_MAMBA,
        "mamba_conv_bias": False,
        "mamba_d_conv": 3,
        "mamba_proj_bias": True,
    },
    "two_mixers_gate_first": {**TINY_TWO_MIXERS, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "two_mixers_norm_first": {**TINY_TWO_MIXERS, "mamba_rms_norm": True, "attention_bias": True},
    "single_blocks": {**TINY_SINGLE_BLOCKS, "hybrid_override_pattern": "MM*--M"},
}
EXPERT_MODELS: dict[str, dict[str, Any]] = {
    "gated_shared_expert_and_weights_that_are_not_normalized": {
        "model_type": "qwen2_moe",
        "num_experts": 37,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [0],
    },
    "gated_delta_nets": {**TINY_DELTA, "model_type": "qwen3_5_moe_text", "num_experts": 5, "num_experts_per_tok": 2},
    "sigmoid_with_correction_biases": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "n_routed_experts": 18,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
    },
    "short_convolutions_with_biases": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention"],
        "conv_bias": True,
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
    },
    "experts_without_gates": TINY_SINGLE_BLOCKS,
    "softmax_of_chosen": {**TINY_MAMBA, "num_local_experts": 5, "residual_multiplier": 0.4},
}


OP_BY_OP = {"olmo2_post_norm", "gpt_oss_sinks", "cohere2_parallel"}
OP_BY_OP |= {"apertus_xielu", "afmoe_gated_attention", "ministral3_scaled_queries"}
OP_BY_OP |= {
    "lfm2_without_attention",
    "gemma4_keys_as_values",
    "gemma4_e_shared_keys",
    "qwen3_next_fused_delta",
    "olmo_hybrid_split_delta",
    "kimi_linear_delta",
    "minimax_m2_partial_rotation",
}
OP_BY_OP |= {family for family in FAMILIES if "deepseek" in family or "latents" in family}


def decoded(model, prompts, monkeypatch, *, in_one_call: bool) -> tuple[np.ndarray, set[bool]]:
    """Return the hidden states of several passes over one and two new positions, and which of them ran in one call."""
    in_calls = set()

    def run(*arguments):
        found = cpp_layers.run_cpp_layers(*arguments) if in_one_call else None
        in_calls.add(found is not None)
        return found

    monkeypatch.setattr(decoder, "run_cpp_layers", run)
    with paddle.no_grad():
        cache, _ = prefill(model, prompts)
        in_calls.clear()
        passes = [[[1 + n, 7, 3][: 2 - n % 2] for _ in prompts] for n in range(4)]
        hidden = [forward(model, tokens, cache).numpy() for tokens in passes]
    return np.concatenate(hidden, axis=1), in_calls


def check_equal(model, monkeypatch, prompts=PROMPTS, tolerance: float = 2e-6) -> None:
    expected, _ = decoded(model, prompts, monkeypatch, in_one_call=False)
    found, in_calls = decoded(model, prompts, monkeypatch, in_one_call=True)
    assert in_calls == {True}
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@paddle.no_grad()
def test_cpp_layers_of_several_parts_equal_one_part():
    """Run the layers in parts as virtual pipeline stages do, from a first pass that is short enough for C++."""
    model = tiny_model("llama_grouped_heads")
    decoder, prompt = model.model, PROMPTS[1]
    cache, x = KVCache([0]), []
    for first, end in ((0, 3), (3, 5)):
        ids = paddle.to_tensor([prompt[first:end]])
        inputs = decoder.attention_inputs(ids, None, None, cache)
        x.append(decoder.embed(ids))
        for index in range(len(decoder.layers)):
            x[-1] = decoder.run_layers(x[-1], inputs, index, index + 1)
    expected = model.hidden_states(paddle.to_tensor([prompt])).numpy()
    found = decoder.final_norm(paddle.concat(x, axis=1)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OP_BY_OP])
def test_cpp_layers_equals_layers_one_by_one(family, monkeypatch):
    check_equal(tiny_model(family), monkeypatch)


@pytest.mark.parametrize("family", sorted(OP_BY_OP))
def test_cpp_layers_of_other_layers_runs_op_by_op(family, monkeypatch):
    assert decoded(tiny_model(family), PROMPTS, monkeypatch, in_one_call=True)[1] == {False}


@pytest.mark.parametrize("algo", ["nf4", "weight_only_int8", "weight_only_int4"])
@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_cpp_layers_with_quantized_weights_and_biases_equals_layers(algo, num_rows, monkeypatch):
    """Test whole blocks in a row (hidden size 64) and blocks across rows (inner size 96), and biases of qwen2."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    model = AutoModelForCausalLM.from_config({**SIZES, "model_type": "qwen2", **sizes})
    quantize_linears(model, QuantizationConfig(algo=algo))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.set_value(paddle.randn(layer.self_attn.k_proj.bias.shape))
    check_equal(model, monkeypatch, PROMPTS[:num_rows])


@pytest.mark.skipif(bf16.unavailable_reason() is not None, reason="needs bfloat16 products")
def test_cpp_layers_in_bfloat16_equals_layers(monkeypatch):
    model = AutoModelForCausalLM.from_config({**SIZES, "model_type": "llama"}, dtype="bfloat16")
    check_equal(model, monkeypatch)


def test_cpp_layers_after_a_prefix_equals_layers(monkeypatch):
    """Test stored keys and values that precede every row, which prefix tuning has."""
    model = tiny_model("mistral_window")
    rng = np.random.default_rng(0)
    shape = [3, 2, model.model.layers[0].self_attn.head_dim]
    pairs = {i: tuple(paddle.to_tensor(rng.normal(0, 1, shape), "float32") for _ in "kv") for i in range(2)}
    real = decoder.Decoder.forward

    def with_prefix(self, *arguments):
        if arguments[3].is_new:
            arguments[3].set_prefix(pairs)
        return real(self, *arguments)

    monkeypatch.setattr(decoder.Decoder, "forward", with_prefix)
    check_equal(model, monkeypatch)


def test_cpp_layers_over_later_rows_of_a_running_batch_equals_layers(monkeypatch):
    """Test rows of unequal lengths that are not the first ones, up to a column where the cache grows."""
    model, lengths, results = tiny_model("qwen3_qk_norm"), (5, BLOCK - 1, 9), []
    prompts = random_prompts(lengths)

    def forward(cache, first, tokens_BS):
        view = cache.rows(first, len(tokens_BS), lengths[first : first + len(tokens_BS)])
        positions = np.array(cache.lengths[first:])[: len(tokens_BS), None] + np.arange(len(tokens_BS[0]))
        ids = paddle.to_tensor(np.array(tokens_BS))
        hidden = model.hidden_states(ids, position_ids=paddle.to_tensor(positions), cache=view).numpy()
        view.advance()
        return hidden

    for in_one_call in (False, True):
        monkeypatch.setattr(decoder, "run_cpp_layers", cpp_layers.run_cpp_layers if in_one_call else lambda *_: None)
        cache = SlotCache()
        with paddle.no_grad():
            for row, prompt in enumerate(prompts):
                cache.add_row()
                forward(cache, row, [prompt])
            results.append(np.concatenate([forward(cache, 1, [[n], [7]]) for n in range(4)], axis=1))
        assert any(isinstance(kept, cpp_layers.CppLayers) for kept in cache.derived_tensors.values()) == in_one_call
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=2e-6 * np.abs(results[0]).max())


def test_cpp_layers_with_adapter_or_hook_runs_op_by_op(monkeypatch):
    model = AutoModelForCausalLM.from_config({**SIZES, "model_type": "llama"})
    hook = model.model.layers[1].mlp.register_forward_post_hook(lambda layer, inputs, output: output * 2)
    assert decoded(model, PROMPTS, monkeypatch, in_one_call=True)[1] == {False}
    hook.remove()
    assert decoded(model, PROMPTS, monkeypatch, in_one_call=True)[1] == {True}
    adapted = get_peft_model(model, LoRAConfig(rank=2, use_dora=True))
    assert decoded(adapted, PROMPTS, monkeypatch, in_one_call=True)[1] == {False}


def test_cpp_layers_with_lora_on_layers_and_lm_head_equals_layers(monkeypatch):
    adapted = get_peft_model(
        AutoModelForCausalLM.from_config({**SIZES, "model_type": "llama"}),
        LoRAConfig(rank=2, target_modules=["q_proj", "down_proj", "lm_head"]),
    )
    for tensor in adapted.adapter_state().values():
        tensor.set_value(paddle.randn(tensor.shape) * 0.2)
    check_equal(adapted, monkeypatch)


@pytest.mark.parametrize(
    ("ids", "positions", "message"),
    [
        ([[7], [8]], [[21]], "positions and hidden states must have the same batch size and length"),
        ([[7]], [[21]], "cache and hidden states must have the same batch size"),
        ([[7]] * 3, [[21]] * 3, "cache and hidden states must have the same batch size"),
    ],
)
def test_cpp_layers_with_another_number_of_rows_raises(ids, positions, message):
    """Test that C++ neither reads nor writes beyond tables and caches of two rows."""
    model = tiny_model("llama_grouped_heads")
    with paddle.no_grad():
        cache, _ = prefill(model, PROMPTS[:2])
        with pytest.raises(AssertionError, match=message):
            model.hidden_states(paddle.to_tensor(ids), position_ids=paddle.to_tensor(positions), cache=cache)


def test_cpp_layers_with_zero_points_equals_the_full_sequence():
    """Test weights in the layout of GPTQ, whose codes alone would be another matrix."""
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES["llama_grouped_heads"]})
    quantize_linears(model, QuantizationConfig(algo="weight_only_int4", group_size=16))
    for layer in quantized_layers(model).values():
        weight = layer.stored
        zeros = paddle.ones(weight.scales.shape, "int8")
        layer._set_packed(dataclasses.replace(weight, zeros=zeros))
    (prompt,) = random_prompts([6])
    with paddle.no_grad():
        cache, _ = prefill(model, [prompt])
        found = on_host(step(model, [[7]], cache))[:, -1]
        expected = model(paddle.to_tensor([[*prompt, 7]]))[:, -1].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_cpp_layers_of_quantized_gated_delta_nets_equal_layers(monkeypatch):
    model = slow_decays(AutoModelForCausalLM.from_config({**SIZES, **FAMILIES["qwen3_5_gated_delta"]}))
    check_equal(model, monkeypatch)
    quantize_linears(model, QuantizationConfig(algo="weight_only_int8"))
    check_equal(model, monkeypatch, PROMPTS[:1])


def test_cpp_layers_without_attention_run_op_by_op(monkeypatch):
    """Such as a pipeline stage of gated delta nets: the cache has no keys that `reserve` could extend."""
    layers = {"layer_types": ["linear_attention"] * 2}
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES["qwen3_5_gated_delta"], **layers})
    assert decoded(model, PROMPTS, monkeypatch, in_one_call=True)[1] == {False}


@pytest.mark.parametrize("algo", [None, "weight_only_int8"])
@pytest.mark.parametrize("name", MAMBA_MODELS)
def test_cpp_layers_with_mamba2_equal_layers(name, algo, monkeypatch):
    paddle.seed(0)
    model = slow_decays(AutoModelForCausalLM.from_config({**SIZES, **MAMBA_MODELS[name]}))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith((".D", "mamba.norm.weight", "in_proj.bias")):
            parameter.set_value(paddle.rand(parameter.shape))
    if algo is not None:
        quantize_linears(model, QuantizationConfig(algo=algo))
    check_equal(model, monkeypatch, tolerance=5e-6)


@pytest.mark.parametrize("algo", [None, "nf4"])
@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_cpp_layers_with_experts_equal_layers(name, algo, monkeypatch):
    """Test rows whose experts differ, and with one row, an expert whose rows are the whole batch."""
    paddle.seed(0)
    model = slow_decays(AutoModelForCausalLM.from_config({**SIZES, **EXPERT_MODELS[name]}))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("e_score_correction_bias"):
            parameter.set_value(paddle.rand(parameter.shape))
    if algo is not None:
        quantize_linears(model, QuantizationConfig(algo=algo))
    for num_rows in (1, 3):
        check_equal(model, monkeypatch, PROMPTS[:num_rows], tolerance=5e-6)


@paddle.no_grad()
def test_cpp_layers_with_nan_logits_of_a_router_leave_other_rows_unchanged():
    """Test that the experts of a position are distinct, so that their rows fit the memory of the step."""
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES["mixtral_experts"], "num_experts_per_tok": 5})
    absent = next(token for token in range(1, SIZES["vocab_size"]) if not any(token in each for each in PROMPTS))
    model.model.embed_tokens.weight[absent] = float("nan")
    hidden = [forward(model, [[token], [token], [3]], prefill(model, PROMPTS)[0]).numpy() for token in (7, absent)]
    assert np.isnan(hidden[1][:2]).all()
    np.testing.assert_allclose(hidden[1][2], hidden[0][2], rtol=1e-5)


def test_cpp_layers_with_a_router_loss_have_no_loss(monkeypatch):
    options = {**FAMILIES["mixtral_experts"], "output_router_logits": True, "router_aux_loss_coef": 0.1}
    model = AutoModelForCausalLM.from_config({**SIZES, **options})
    assert decoded(model, PROMPTS, monkeypatch, in_one_call=True)[1] == {True}
    assert model.model.load_balance.loss is None


def test_cpp_layers_of_a_bfloat16_model_with_mamba2_keep_states_in_float32(monkeypatch):
    if bf16.unavailable_reason() is not None:
        pytest.skip("needs bfloat16 products")
    check_equal(AutoModelForCausalLM.from_config({**SIZES, **TINY_MAMBA}, dtype="bfloat16"), monkeypatch)


@pytest.mark.parametrize(
    "family", ["qwen3_5_gated_delta", "granite_4_mamba2", "falcon_h1_two_mixers", "lfm2_convolutions"]
)
@paddle.no_grad()
def test_cpp_layers_of_a_row_that_begins_within_the_pass_equal_layers(family, monkeypatch):
    """Test padding at the start of a later pass, which must not change the state of a mixer."""
    model = tiny_model(family)
    ids, results = np.array([[5, 6, 7, 8], [1, 1, 1, 9]]), []
    for in_one_call in (False, True):
        monkeypatch.setattr(decoder, "run_cpp_layers", cpp_layers.run_cpp_layers if in_one_call else lambda *_: None)
        cache = KVCache([0, 3])
        hidden = [model.hidden_states(paddle.to_tensor(part), cache=cache).numpy() for part in np.split(ids, 2, axis=1)]
        hidden.append(model.hidden_states(paddle.to_tensor([[4], [3]]), cache=cache).numpy())
        results.append(np.concatenate(hidden, axis=1)[:, 3:])
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=2e-6 * np.abs(results[0]).max())
