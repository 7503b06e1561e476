"""Compare the decoding step of a model in one C++ call with its ops one by one."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.continuous_kv_cache import SlotCache
from paddlenlp_ext.generation.logits_processors import on_host
from paddlenlp_ext.generation.padded_kv_cache import BLOCK, KVCache, _LayerKeyValues
from paddlenlp_ext.generation.prefill_and_decode import forward, prefill, step
from paddlenlp_ext.models import decoder
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoding.eligibility import max_length
from paddlenlp_ext.nn.recurrent_mixer import RecurrentMixer
from paddlenlp_ext.nn.short_convolution import ShortConvolution
from paddlenlp_ext.ops.cpp import bf16, library
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model
from tests.models.decoding.test_cpp_layers import OP_BY_OP

pytestmark = pytest.mark.skipif(library.unavailable_reason() is not None, reason="needs the C++ library")
PROMPTS = random_prompts((21, 5, 9))
SEPARATE_CALLS = OP_BY_OP | {"gemma2_softcaps"}


def model_of(**config: Any):
    return AutoModelForCausalLM.from_config({**SIZES, "model_type": "llama", **config})


def op_by_op(model, tokens_BS, cache, monkeypatch) -> np.ndarray:
    """Return the logits of a step whose ops run one by one."""
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "run_cpp_layers", lambda *_: None)
        return model.logits(forward(model, tokens_BS, cache)).astype("float32").numpy()


def assert_equal(found: Any, expected: np.ndarray, tolerance: float = 3e-6) -> None:
    assert isinstance(found, np.ndarray), "the step ran in separate calls"
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@paddle.no_grad()
def check_steps(model, monkeypatch, prompts=PROMPTS, num_steps: int = 4, tolerance: float = 3e-6) -> None:
    """Compare steps of one and two new tokens, while a row is removed and positions are taken back.

    Positions are not taken back from states, because the caches would become empty.
    """
    caches = [prefill(model, prompts)[0] for _ in range(2)]
    num_rows = len(prompts)
    for n in range(num_steps):
        if n == 2 and num_rows > 1:
            num_rows -= 1
            for cache in caches:
                cache.select_rows([*range(1, num_rows + 1)])
                if not any(isinstance(each, RecurrentMixer | ShortConvolution) for each in model.sublayers()):
                    cache.truncate(cache.length - 1)
        tokens_BS = [[1 + n + row, 7][: 1 + n % 2] for row in range(num_rows)]
        expected = op_by_op(model, tokens_BS, caches[0], monkeypatch)
        assert_equal(step(model, tokens_BS, caches[1]), expected, tolerance)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SEPARATE_CALLS])
def test_cpp_model_equals_ops_one_by_one(family, monkeypatch):
    check_steps(tiny_model(family), monkeypatch)


@pytest.mark.parametrize("family", sorted(SEPARATE_CALLS))
def test_cpp_model_of_other_models_runs_in_separate_calls(family):
    model = tiny_model(family)
    with paddle.no_grad():
        assert isinstance(step(model, [[7]] * 3, prefill(model, PROMPTS)[0]), paddle.Tensor)


def test_cpp_model_multiplies_the_input_of_lm_head_by_the_logit_scale(monkeypatch):
    check_steps(model_of(model_type="granite", logits_scaling=4.0), monkeypatch)


@pytest.mark.parametrize("algo", ["nf4", "weight_only_int8"])
def test_cpp_model_with_quantized_layers_equals_ops(algo, monkeypatch):
    model = model_of(model_type="qwen2", hidden_size=64, intermediate_size=96)
    quantize_linears(model, QuantizationConfig(algo=algo))
    check_steps(model, monkeypatch)


@pytest.mark.skipif(bf16.unavailable_reason() is not None, reason="needs bfloat16 products")
@pytest.mark.parametrize("is_tied", [False, True])
def test_cpp_model_in_bfloat16_equals_ops(is_tied, monkeypatch):
    """Test a hidden size that is not a multiple of a vector's, so that rows of the embedding end within one."""
    sizes = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
    config = {**SIZES, "model_type": "llama", **sizes, "tie_word_embeddings": is_tied}
    check_steps(AutoModelForCausalLM.from_config(config, dtype="bfloat16"), monkeypatch)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    ],
)
def test_cpp_model_with_scaled_frequencies_equals_ops(rope, monkeypatch):
    """Test steps across the trained context, behind which dynamic frequencies change in every step."""
    check_steps(model_of(rope_scaling=rope, rope_theta=100.0, max_position_embeddings=23), monkeypatch)


def test_cpp_model_within_the_context_of_the_query_scale_equals_ops(monkeypatch):
    config = {"model_type": "ministral3", "head_dim": 16, "original_max_position_embeddings": 29}
    model = model_of(**config)
    check_steps(model, monkeypatch)
    cache, _ = prefill(model, random_prompts((29,)))
    assert isinstance(step(model, [[7]], cache), paddle.Tensor), "position 29 has a scale"


def test_cpp_model_with_longrope_marks_a_stale_cache():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = model_of(rope_scaling=rope, original_max_position_embeddings=7, head_dim=8)
    with paddle.no_grad():
        cache, _ = prefill(model, random_prompts([6]))
        stale = []
        for _ in range(2):
            assert isinstance(step(model, [[7]], cache), np.ndarray)
            stale.append(cache.is_stale)
    assert stale == [False, True]


def test_cpp_model_beyond_the_capacity_of_the_cache_equals_ops(monkeypatch):
    check_steps(tiny_model("llama_grouped_heads"), monkeypatch, random_prompts((BLOCK - 1, 5)), num_steps=2)


def test_cpp_model_frees_the_keys_of_each_layer_as_the_cache_grows(monkeypatch):
    """Test that two copies exist of one layer's cache at a time, not of all layers'."""
    model, real, counts = tiny_model("llama_grouped_heads"), _LayerKeyValues.grow, []
    with paddle.no_grad():
        cache, _ = prefill(model, random_prompts((BLOCK - 1,)))
        step(model, [[7]], cache)
        stored = [weakref.ref(tensor) for tensor in cache.tensors]

        def grow(layer: _LayerKeyValues, end: int) -> None:
            real(layer, end)
            counts.append(sum(tensor() is not None for tensor in stored))

        monkeypatch.setattr(_LayerKeyValues, "grow", grow)
        step(model, [[7]], cache)
    assert counts == [2 * layer for layer in reversed(range(len(stored) // 2))]


@pytest.mark.parametrize("family", ["llama_grouped_heads", "mistral_window"])
def test_cpp_model_after_a_prefix_equals_ops(family, monkeypatch):
    """Test a prefix that a window of 8 sees in part."""
    model, rng = tiny_model(family), np.random.default_rng(0)
    shape = [4, 2, model.model.layers[0].self_attn.head_dim]
    prefixes = {i: tuple(paddle.to_tensor(rng.normal(0, 1, shape), "float32") for _ in "kv") for i in range(2)}
    real = KVCache.__init__

    def with_prefix(self, *arguments, **options):
        real(self, *arguments, **options)
        self.set_prefix(prefixes)

    monkeypatch.setattr(KVCache, "__init__", with_prefix)
    check_steps(model, monkeypatch, random_prompts((3, 5, 1)))


@pytest.mark.parametrize("family", ["qwen3_qk_norm", "granite_4_mamba2"])
def test_cpp_model_over_later_rows_of_a_running_batch_equals_ops(family, monkeypatch):
    """Test rows of unequal lengths that are not the first ones, one of which leaves, up to where the cache grows."""
    model, lengths, caches = tiny_model(family), (5, BLOCK - 2, 9), [SlotCache(), SlotCache()]

    def run(cache, first, tokens_BS, function, *arguments):
        view = cache.rows(first, len(tokens_BS), [1] * len(tokens_BS))
        found = function(model, tokens_BS, view, *arguments)
        view.advance()
        return found

    with paddle.no_grad():
        for cache in caches:
            for row, prompt in enumerate(random_prompts(lengths)):
                cache.add_row()
                run(cache, row, [prompt], forward)
        for first, tokens_BS in ((1, [[3], [7]]), (1, [[4], [8]]), (1, [[5], [9]]), (0, [[6], [1]]), (0, [[2]])):
            expected = run(caches[0], first, tokens_BS, op_by_op, monkeypatch)
            assert_equal(run(caches[1], first, tokens_BS, step), expected)
            if first == 1 and tokens_BS[0] == [5]:
                for cache in caches:
                    cache.move_row(2, 0)
                    cache.remove_last_row()


def test_cpp_model_of_adapters_and_hooks_runs_in_separate_calls():
    model = model_of()

    def runs_in_one_call(model) -> bool:
        with paddle.no_grad():
            return isinstance(step(model, [[7]] * 3, prefill(model, PROMPTS)[0]), np.ndarray)

    for layer in (model, model.model, model.model.embed_tokens, model.model.norm, model.model.layers[0].mlp):
        hook = layer.register_forward_post_hook(lambda layer, inputs, output: output)
        assert not runs_in_one_call(model)
        hook.remove()
    assert runs_in_one_call(model)
    configs = [
        LoRAConfig(rank=2, target_modules=["lm_head"]),
        LoRAConfig(rank=2, lora_bias=True),
        LoRAConfig(rank=2, use_dora=True),
        PromptTuningConfig(num_virtual_tokens=2),
        PrefixTuningConfig(num_virtual_tokens=2),
        ReFTConfig(),
    ]
    for config in configs:
        adapted = get_peft_model(model_of(), config)
        assert not runs_in_one_call(adapted), config


def with_lora(model, rank: int = 3):
    """Return the model with a LoRA whose update changes the logits."""
    adapted = get_peft_model(model, LoRAConfig(rank=rank, lora_alpha=2 * rank))
    adapted.eval()
    for name, tensor in adapted.adapter_state().items():
        if "lora_B" in name:
            tensor.set_value(paddle.randn(tensor.shape).astype(tensor.dtype) * 0.2)
    return adapted


@pytest.mark.parametrize("family", ["llama_grouped_heads", "qwen3_5_gated_delta"])
@pytest.mark.parametrize("has_many_rows", [False, True])
@pytest.mark.parametrize("algo", [None, "nf4", "weight_only_int8"])
def test_cpp_model_with_lora_equals_ops(family, has_many_rows, algo, monkeypatch):
    paddle.seed(0)
    model = model_of(**FAMILIES[family])
    if algo is not None:
        quantize_linears(model, QuantizationConfig(algo=algo))
    adapted = with_lora(model)
    num_rows = library.small_batch_rows(in_bf16=False) + 3 if has_many_rows else 3
    check_steps(adapted, monkeypatch, random_prompts(range(2, 2 + num_rows)))
    assert not np.allclose(lora_logits(adapted, True), lora_logits(adapted, False), rtol=0.05)


@pytest.mark.parametrize("family", ["granite_4_mamba2_experts", "falcon_h1_two_mixers", "lfm2_convolutions"])
def test_cpp_model_with_lora_on_other_mixers_equals_ops(family, monkeypatch):
    """Test factors of outputs, which also apply to the update."""
    paddle.seed(0)
    check_steps(with_lora(model_of(**FAMILIES[family])), monkeypatch, tolerance=5e-6)


@paddle.no_grad()
def lora_logits(adapted, enabled: bool) -> np.ndarray:
    """Return the logits of a step with or without the adapter."""
    with nullcontext() if enabled else adapted.adapter.disabled():
        return np.array(step(adapted, [[7]] * 3, prefill(adapted, PROMPTS)[0]))


def test_cpp_model_with_disabled_lora_equals_the_base():
    base = model_of()
    with paddle.no_grad():
        expected = np.array(step(base, [[7]] * 3, prefill(base, PROMPTS)[0]))
    np.testing.assert_array_equal(lora_logits(with_lora(base), False), expected)


def test_cpp_model_with_lora_of_different_ranks_equals_ops(monkeypatch):
    """Test a rank above the rank of the first layers, which the shared memory of a step must fit."""
    paddle.seed(0)
    adapted = get_peft_model(model_of(), LoRAConfig(rank=2, rank_pattern={"down_proj": 40}))
    adapted.eval()
    for tensor in adapted.adapter_state().values():
        tensor.set_value(paddle.randn(tensor.shape) * 0.2)
    check_steps(adapted, monkeypatch)


@pytest.mark.skipif(bf16.unavailable_reason() is not None, reason="needs bfloat16 products")
def test_cpp_model_with_lora_in_bfloat16_equals_ops(monkeypatch):
    """The tolerance is the rounding of the update to bfloat16, which the step computes in float32."""
    paddle.seed(0)
    model = AutoModelForCausalLM.from_config({**SIZES, "model_type": "llama"}, dtype="bfloat16")
    check_steps(with_lora(model), monkeypatch, tolerance=2.0**-6)


def test_cpp_model_of_long_rows_runs_in_separate_calls():
    model = tiny_model("llama_grouped_heads")
    with paddle.no_grad():
        for length, in_one_call in ((max_length(), True), (max_length() + 1, False)):
            cache, _ = prefill(model, PROMPTS)
            assert isinstance(step(model, [[7] * length] * 3, cache), np.ndarray) == in_one_call


@pytest.mark.parametrize("algo", [None, "nf4", "weight_only_int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpp_model_of_many_rows_equals_ops(algo, dtype, monkeypatch):
    """Test products by oneDNN, of weights that each thread dequantizes in several parts, and biases.

    In bfloat16, a difference in the last bit of a sum may change how activations are rounded, each by up to 2^-8 of its
    value.
    """
    if dtype == "bfloat16" and bf16.unavailable_reason() is not None:
        pytest.skip("needs bfloat16 products")
    paddle.seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 4160, "model_type": "qwen2"}
    model = AutoModelForCausalLM.from_config({**SIZES, **sizes}, dtype=dtype)
    if algo is not None:
        quantize_linears(model, QuantizationConfig(algo=algo))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.set_value(paddle.randn(layer.self_attn.k_proj.bias.shape))
    num_rows = library.small_batch_rows(dtype == "bfloat16") + 3
    tolerance = 2.0**-6 if dtype == "bfloat16" else 3e-6
    check_steps(model, monkeypatch, random_prompts(range(2, 2 + num_rows)), num_steps=3, tolerance=tolerance)


def test_cpp_model_with_another_number_of_rows_raises():
    """Test that C++ writes nowhere beyond the caches of two rows."""
    model = tiny_model("llama_grouped_heads")
    with paddle.no_grad():
        cache, _ = prefill(model, PROMPTS[:2])
        with pytest.raises(AssertionError, match="cache and hidden states must have the same batch size"):
            step(model, [[7]] * 3, cache)


@pytest.mark.parametrize("token", [-1, SIZES["vocab_size"]])
def test_cpp_model_with_a_token_outside_the_vocabulary_raises(token):
    """Test that the cache is left as it was."""
    model = tiny_model("llama_grouped_heads")
    with paddle.no_grad():
        cache, _ = prefill(model, PROMPTS[:2])
        length = cache.length
        with pytest.raises(
            ValueError, match=f"token ids from {min(token, 7)} to {max(token, 7)}, but the embedding has 97 rows"
        ):
            step(model, [[7], [token]], cache)
    assert cache.length == length


def test_on_host_of_bfloat16_logits_is_float32():
    logits = on_host(paddle.to_tensor([[-1.5, 2.0]], "bfloat16"))
    assert logits.dtype == np.float32 and logits.tolist() == [[-1.5, 2.0]]
