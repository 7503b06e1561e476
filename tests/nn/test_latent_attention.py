"""Latent attention: what its cache stores, and decoding by latents against the full forward pass."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.common.models import TINY_LATENT, TINY_SIZES

IDS = paddle.to_tensor(np.random.default_rng(0).integers(0, 61, (2, 20)))
PADDING = 7


def make_model(**changes: object) -> CausalLM:
    return AutoModelForCausalLM.from_config({**TINY_SIZES, **TINY_LATENT, "q_lora_rank": 9, **changes}, seed=3)


def decoded(model: CausalLM, cache: KVCache) -> np.ndarray:
    """Return the logits of a prefill of 15, then of 2 positions, then of one at a time."""
    with paddle.no_grad():
        steps = [IDS[:, :15], IDS[:, 15:17], *(IDS[:, end - 1 : end] for end in range(18, 21))]
        return paddle.concat([model(step, cache=cache) for step in steps], axis=1).numpy()


ALIBI = {"rope_parameters": {"rope_type": "alibi"}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.5}


@pytest.mark.parametrize(
    "changes",
    [{}, {"q_lora_rank": None, "rope_interleave": False, "rope_parameters": YARN}, ALIBI],
    ids=["compressed queries", "plain queries, yarn", "linear biases"],
)
def test_decoding_by_latents_matches_full_forward(changes):
    """Test rows of 20 and 13 tokens, the second left-padded."""
    model = make_model(**changes)
    logits = decoded(model, KVCache([0, PADDING]))
    np.testing.assert_allclose(logits[0], model(IDS[:1])[0].numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits[1, PADDING:], model(IDS[1:, PADDING:])[0].numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("algo", ["nf4", "weight_only_int8"])
def test_decoding_by_latents_of_quantized_weights_matches_full_forward(algo):
    model = make_model()
    quantize_linears(model, QuantizationConfig(algo=algo))
    logits = decoded(model, KVCache([0, 0]))
    np.testing.assert_allclose(logits, model(IDS).numpy(), rtol=0, atol=1e-5)


def test_cache_stores_latents_and_shared_keys():
    model, cache = make_model(), KVCache([0, PADDING])
    decoded(model, cache)
    cache.select_rows([0])
    for latents, keys in cache.as_prefix().key_values.values():
        assert (latents.shape, keys.shape) == ([20, 1, 14], [20, 1, 6])


PLANS = {
    "full": RecomputePlan(),
    "full_attn": RecomputePlan("full_attn"),
    "core_attn": RecomputePlan("core_attn"),
    "saved projections": RecomputePlan(saved_regions={"attention_column_ln": -1}),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_recompute_of_latent_attention_keeps_gradients(plan):
    runs = []
    for each in (None, plan):
        model = make_model().train()
        if each is not None:
            model.enable_recompute(each)
        hidden = model.hidden_states(IDS, document_lengths=[[9, 11], [20]])
        # The square of a normalized state has almost no gradient.
        (hidden * paddle.to_tensor(np.random.default_rng(0).normal(size=hidden.shape), "float32")).mean().backward()
        runs.append({name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None})
    assert runs[0].keys() == runs[1].keys() and any("kv_a_proj" in name for name in runs[0])
    # The layers of a plan that selects regions run op by op, not in training blocks.
    tolerance = 0 if plan == RecomputePlan() else 3e-6
    for name, gradient in runs[0].items():
        np.testing.assert_allclose(runs[1][name], gradient, rtol=0, atol=tolerance * abs(gradient).max(), err_msg=name)


def test_packed_documents_of_latent_attention_equal_single_documents():
    model = make_model()
    packed = model(IDS[:1], document_lengths=[[9, 11]])[0].numpy()
    parts = [model(IDS[:1, :9])[0].numpy(), model(IDS[:1, 9:])[0].numpy()]
    np.testing.assert_allclose(packed, np.concatenate(parts), rtol=0, atol=1e-5)
