"""Test the decoder: packed documents, recompute, cache, tied embeddings."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from tests.common.arrays import FLOAT32_ROUNDING
from tests.common.models import (
    TINY_DELTA,
    TINY_KIMI_DELTA,
    TINY_LATENT,
    TINY_MAMBA,
    TINY_SINGLE_BLOCKS,
    TINY_SPLIT_DELTA,
    TINY_TWO_MIXERS,
)
from tests.models.tiny_model import TINY, make_model, make_model_with_sinks, make_model_with_slow_decays

LENGTHS = [17, 5, 30, 26, 1, 40]
WINDOWED = {"model_type": "mistral", "sliding_window": 9}
CAPPED = {"model_type": "gemma2", "head_dim": 12, "sliding_window": 9, "attn_logit_softcapping": 0.5}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 5}
CONVOLUTIONS = {"model_type": "lfm2", "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False}
GEMMA_4 = {
    "model_type": "gemma4_text",
    "head_dim": 12,
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
    "initializer_range": 0.2,
}
"""Layers with heads of different sizes, one without a value projection, and experts."""
GEMMA_4_E = {
    **{key: value for key, value in GEMMA_4.items() if key != "enable_moe_block"},
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": TINY["vocab_size"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "initializer_range": 0.1,
}
"""Layer embeddings, and two layers that read the keys and values of earlier layers, one of them with a window."""
SCALED_QUERIES = {"model_type": "ministral3", "head_dim": 12, "original_max_position_embeddings": 9}
SCALED_LATENTS = {**TINY_LATENT, "model_type": "mistral4", "original_max_position_embeddings": 9}
PARTIAL = {"model_type": "glm4", "head_dim": 12}
"""Half of the channels are rotated."""


def make_model_with_small_scores(**changes) -> CausalLM:
    """Build a model with small norms of queries and keys: large scores, which have no scale, enlarge rounding."""
    model = make_model(**changes)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.set_value(0.3 * parameter)
    return model


def random_ids(*shape: int, seed: int = 0) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(seed).integers(0, TINY["vocab_size"], shape))


def gradients(model: CausalLM) -> dict[str, np.ndarray]:
    parameters = {name: each for name, each in model.named_parameters() if not each.stop_gradient}
    found = {name: parameter.grad.numpy() for name, parameter in parameters.items()}
    model.clear_gradients()
    return found


def loss_sum(model: CausalLM, ids: paddle.Tensor, labels: paddle.Tensor, documents=None) -> paddle.Tensor:
    hidden = model.hidden_states(ids, document_lengths=documents).flatten(0, 1)
    return linear_cross_entropy(hidden, model.head_weight(), labels.flatten(), chunk=16)[0]


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_model, {}),
        (make_model, WINDOWED),
        (make_model, EXPERTS),
        (make_model, PARTIAL),
        (make_model, CAPPED),
        (make_model_with_sinks, WINDOWED),
        (make_model, CONVOLUTIONS),
        (make_model, SCALED_QUERIES),
        (make_model, SCALED_LATENTS),
        (make_model, GEMMA_4),
        (make_model_with_small_scores, GEMMA_4_E),
        (make_model_with_slow_decays, TINY_DELTA),
        (make_model_with_slow_decays, {**TINY_MAMBA, "num_local_experts": 5}),
        (make_model_with_slow_decays, TINY_TWO_MIXERS),
        (make_model_with_slow_decays, TINY_KIMI_DELTA),
        (make_model_with_slow_decays, TINY_SINGLE_BLOCKS),
    ],
    ids=[
        *("full", "window", "experts", "partial", "softcap", "sinks"),
        *("convolutions", "scaled_queries", "scaled_latents", "gemma4", "gemma4_e", "delta", "mamba2"),
        *("two_mixers", "kimi_delta", "single_blocks"),
    ],
)
def test_decoder_pack_matches_loss_and_gradients_of_documents(make, changes):
    model = make(**changes)
    ids, labels = random_ids(1, sum(LENGTHS)), random_ids(1, sum(LENGTHS), seed=1)
    packed = loss_sum(model, ids, labels, [LENGTHS])
    packed.backward()
    packed_gradients = gradients(model)

    alone, start = 0.0, 0
    for length in LENGTHS:
        part = slice(start, start + length)
        loss = loss_sum(model, ids[:, part], labels[:, part])
        loss.backward()
        alone, start = alone + float(loss), start + length
    assert float(packed) == pytest.approx(alone, rel=1e-6)
    for name, gradient in gradients(model).items():
        difference = np.linalg.norm(packed_gradients[name] - gradient)
        tolerance = 1e-5 if "forget_gate.A_log" in name else 4e-6  # a sum over positions and channels that cancel
        assert difference <= tolerance * np.linalg.norm(gradient), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        WINDOWED,
        PARTIAL,
        CONVOLUTIONS,
        {**GEMMA_4, "enable_moe_block": False},
        GEMMA_4_E,
        TINY_DELTA,
        TINY_SPLIT_DELTA,
        TINY_MAMBA,
        TINY_TWO_MIXERS,
        {**TINY_SINGLE_BLOCKS, "hybrid_override_pattern": "M*-M"},
    ],
    ids=[
        "full",
        "window",
        "partial",
        "convolutions",
        "gemma4",
        "gemma4_e",
        "delta",
        "split_delta",
        "mamba2",
        "two_mixers",
        "single_blocks",
    ],
)
def test_decoder_changed_document_leaves_neighbours_bit_identical(changes):
    model = make_model_with_slow_decays(**changes)
    ids = random_ids(1, sum(LENGTHS))
    other = ids.clone()
    other[:, 22:52] = random_ids(1, 30, seed=2)
    before, after = (model(run, document_lengths=[LENGTHS]).numpy() for run in (ids, other))
    np.testing.assert_array_equal(before[:, :22], after[:, :22])
    np.testing.assert_array_equal(before[:, 52:], after[:, 52:])
    assert np.abs(before[:, 22:52] - after[:, 22:52]).max() > 0.1


def test_decoder_rows_are_documents_by_default():
    model, ids = make_model(), random_ids(3, 12)
    together = model(ids).numpy()
    np.testing.assert_array_equal(together, model(ids, document_lengths=[[12]] * 3).numpy())
    for row in range(3):
        np.testing.assert_allclose(together[row], model(ids[row : row + 1])[0].numpy(), rtol=0, atol=1e-5)


def test_decoder_position_ids_restart_in_each_document_unless_given():
    model, ids = make_model(), random_ids(1, 9)
    positions = paddle.to_tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    expected = model(ids, document_lengths=[[4, 5]]).numpy()
    np.testing.assert_array_equal(model(ids, position_ids=positions, document_lengths=[[4, 5]]).numpy(), expected)
    assert np.abs(model(ids, position_ids=positions * 2, document_lengths=[[4, 5]]).numpy() - expected).max() > 1e-3


def test_decoder_document_lengths_not_filling_rows_raise():
    model, ids = make_model(), random_ids(1, 9)
    for documents in ([[4, 4]], [[9], [9]]):
        with pytest.raises(ValueError, match=r"do not match input_ids of shape \[1, 9\]"):
            model(ids, document_lengths=documents)
    with pytest.raises(ValueError, match="a cache stores one document per row"):
        model(ids, document_lengths=[[9]], cache=KVCache([0]))


@pytest.mark.parametrize("freeze_embedding", [False, True])
def test_decoder_recompute_leaves_gradients_unchanged(freeze_embedding):
    model, ids, labels = make_model_with_sinks(), random_ids(1, 50), random_ids(1, 50, seed=1)
    model.train()
    model.model.embed_tokens.weight.stop_gradient = freeze_embedding

    def run() -> dict[str, np.ndarray]:
        loss_sum(model, ids, labels, [[20, 30]]).backward()
        found = {name: p.grad.numpy() for name, p in model.named_parameters() if not p.stop_gradient}
        model.clear_gradients()
        return found

    plain = run()
    model.enable_recompute()
    again = run()
    assert len(plain) == 22 + (not freeze_embedding)
    for name, gradient in plain.items():
        np.testing.assert_array_equal(again[name], gradient, err_msg=name)


@pytest.mark.parametrize(
    "plan",
    [
        RecomputePlan(),
        RecomputePlan(excluded_layers=frozenset({1, 3})),
        RecomputePlan(saved_regions={"flash_attn": -1, "mlp_row_ln": 2}),
        RecomputePlan(offloads_inputs=True),
        RecomputePlan("full_attn"),
        RecomputePlan("core_attn"),
    ],
    ids=["full", "some_layers", "saved_regions", "offloaded", "full_attn", "core_attn"],
)
@pytest.mark.parametrize("freeze", [False, True], ids=["trained", "frozen_but_q_proj"])
def test_decoder_recompute_of_layers_that_exchange_tensors_leaves_gradients_unchanged(plan, freeze):
    model, ids, labels = make_model(**GEMMA_4_E), random_ids(1, 50), random_ids(1, 50, seed=1)
    model.train()
    for name, parameter in model.named_parameters():
        parameter.stop_gradient |= freeze and "q_proj" not in name
    loss_sum(model, ids, labels, [[20, 30]]).backward()
    plain = gradients(model)
    model.enable_recompute(plan)
    loss_sum(model, ids, labels, [[20, 30]]).backward()
    again = gradients(model)
    assert len(plain) == (5 if freeze else 78)
    for name, gradient in plain.items():
        largest = np.abs(gradient).max()
        assert largest > 0, name
        np.testing.assert_allclose(again[name], gradient, rtol=0, atol=4 * FLOAT32_ROUNDING * largest, err_msg=name)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_model, {}),
        (make_model, WINDOWED),
        (make_model, {"model_type": "qwen3", "head_dim": 12}),
        (make_model_with_sinks, WINDOWED),
        (make_model, GEMMA_4),
        (make_model, GEMMA_4_E),
    ],
    ids=["llama", "window", "qwen3", "sinks", "gemma4", "gemma4_e"],
)
def test_decoder_with_cache_matches_full_forward(make, changes):
    """Test rows of 20 and 13 tokens, the second left-padded; prefill of 15, then 2 positions, then one at a time."""
    model, ids = make(**changes), random_ids(2, 20)
    padding = 7
    full = model(ids[:1]).numpy()[0], model(ids[1:, padding:]).numpy()[0]
    cache = KVCache([0, padding])
    with paddle.no_grad():
        steps = [ids[:, :15], ids[:, 15:17], *(ids[:, end - 1 : end] for end in range(18, 21))]
        logits = paddle.concat([model(step, cache=cache) for step in steps], axis=1).numpy()
    np.testing.assert_allclose(logits[0], full[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits[1, padding:], full[1], rtol=0, atol=1e-5)


@paddle.no_grad()
def test_decoder_softcap_bounds_logits_loss_and_logprobs():
    changes = {"model_type": "gemma2", "head_dim": 8, "initializer_range": 0.3}
    plain = make_model(**changes, final_logit_softcapping=None)
    model, ids = make_model(**changes, final_logit_softcapping=2.0), random_ids(1, 30)
    raw = plain(ids).numpy()[0].astype(np.float64)
    assert np.abs(raw).max() > 4.0
    logits = 2.0 * np.tanh(raw / 2.0)
    np.testing.assert_allclose(model(ids).numpy()[0], logits, rtol=0, atol=1e-5)
    targets = ids.numpy()[0, 1:]
    logprobs = logits[np.arange(29), targets] - np.log(np.exp(logits[:-1]).sum(axis=1))
    hidden = model.hidden_states(ids)[0, :-1]
    np.testing.assert_allclose(model.token_logprobs(hidden, ids[0, 1:]).numpy(), logprobs, rtol=0, atol=1e-5)
    assert float(model(ids, labels=ids).loss) == pytest.approx(-logprobs.mean(), rel=1e-5)


def test_decoder_tied_lm_head_uses_embedding_weight():
    model = make_model(tie_word_embeddings=True)
    assert model.head_weight() is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    loss_sum(model, random_ids(1, 8), random_ids(1, 8, seed=1)).backward()
    used = set(random_ids(1, 8).numpy().ravel().tolist())
    unused = [row for row in range(TINY["vocab_size"]) if row not in used]
    assert np.abs(model.head_weight().grad.numpy()[unused]).max() > 0, "the lm_head's part of the gradient is missing"


def test_use_attention_selects_backend():
    model, ids = make_model(), random_ids(1, 30)
    expected = model(ids, document_lengths=[[10, 20]]).numpy()
    model.use_attention("reference")
    np.testing.assert_allclose(model(ids, document_lengths=[[10, 20]]).numpy(), expected, rtol=0, atol=1e-5)
    model.use_attention("flashmask")
    with pytest.raises(ValueError, match="'flashmask' was requested"):
        model(ids)


def test_use_attention_selects_the_backend_of_both_mixers_of_a_layer():
    model = make_model(**TINY_TWO_MIXERS)
    model.use_attention("reference")
    mixers = [mixer for layer in model.model.layers for mixer in layer.mixers]
    assert len(mixers) == 2 * len(model.model.layers)
    assert {mixer.implementation for mixer in mixers} == {"reference"}


def test_generate_passes_options_on():
    model = make_model()
    prompt = random_ids(6).tolist()
    (tokens,) = model.generate([prompt], max_new_tokens=3)
    expected = list(prompt)
    for _ in range(3):
        expected.append(int(model(paddle.to_tensor([expected]))[0, -1].argmax()))
    assert tokens == expected[6:]


def test_decoder_single_trainable_weight_gets_its_gradient():
    """Train one weight with all others frozen: its gradient is unchanged, and no other weight has one."""
    ids, labels = random_ids(1, 20), random_ids(1, 20, seed=1)
    model = make_model()
    loss_sum(model, ids, labels, [[8, 12]]).backward()
    expected = {name: p.grad.numpy() for name, p in model.named_parameters()}
    for name in (name for name in expected if ".layers.0." in name):
        model = make_model()
        for other, parameter in model.named_parameters():
            parameter.stop_gradient = other != name
        loss_sum(model, ids, labels, [[8, 12]]).backward()
        for other, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (other == name), (name, other)
        gradient = dict(model.named_parameters())[name].grad.numpy()
        # Frozen layers run as training blocks, which add in another order.
        atol = FLOAT32_ROUNDING * np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=atol)
