"""Requirements of every PEFT method, tested for the registry, so that a new method needs no edit here.

The models have plain linear layers, biases and tied embeddings (qwen2), experts, latent attention, or both. One model
has short convolutions, one has layers of different sizes with experts beside the feed-forward block, and one has layer
embeddings and layers that read the keys and values of other layers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import (
    CHANGES_LOGITS_AT_START,
    INPUT_IDS,
    default_config,
    logits_of,
    loss_of,
    same_bits,
    state_of,
)
from tests.peft.adapted_case import EVERY_METHOD, METHODS_OF_EXPERTS, Case, case_keys, plain_base

CASES_OF_METHODS = [*case_keys(EVERY_METHOD, ["llama_layer"]), *case_keys(METHODS_OF_EXPERTS, ["experts_layer"])]
"""Cases of the tests whose outcome depends on the method only: each method once, and once more beside experts."""
CASES = [
    *CASES_OF_METHODS,
    *case_keys(EVERY_METHOD, ["qwen2", "latent_layer"]),
    *case_keys(METHODS_OF_EXPERTS, ["latent_experts"]),
    *case_keys(
        {name: each for name, each in EVERY_METHOD.items() if name != "prefix_tuning"},
        ["convolutions", "gated_delta", "split_delta", "mamba2", "two_mixers", "kimi_delta", "single_blocks"],
    ),
    *case_keys(
        {name: each for name, each in METHODS_OF_EXPERTS.items() if name != "prefix_tuning"}, ["experts_beside"]
    ),
    *case_keys(
        {name: each for name, each in EVERY_METHOD.items() if name not in CHANGES_LOGITS_AT_START}, ["layer_embeddings"]
    ),
]
SAME_START_FOR_EVERY_SEED = (
    *("boft", "ia3", "ln_tuning", "miss", "oft", "olora"),
    *("pissa", "toy_rows", "trainable_tokens", "use_mora"),
)


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """Return a case; with this scope, pytest runs all tests of a case in turn, and then releases its models."""
    return Case(request.param)


once_per_method = pytest.mark.parametrize("case", CASES_OF_METHODS, indirect=True, ids=str)


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the trained adapter."""
    folder = tmp_path_factory.mktemp("adapter")
    case.trained.save_pretrained(folder)
    return folder


def arrays(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def test_get_peft_model_starts_as_base(case: Case):
    if case.method.switch not in CHANGES_LOGITS_AT_START:
        np.testing.assert_allclose(case.started_logits, case.base_logits, atol=case.tolerance)
    else:
        assert np.abs(case.started_logits - case.base_logits).max() > case.tolerance, (
            f"{case.name} starts as the base; remove it from CHANGES_LOGITS_AT_START"
        )


def test_training_changes_only_the_adapter(case: Case):
    """Compare a trained model with a new one, all of whose values depend on the seed only."""
    model = case.trained
    adapter = {id(tensor) for tensor in model.adapter_state().values()}
    base = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in adapter}
    assert base
    assert len(base) == len(plain_base(case.family).parameters())
    assert all(parameter.stop_gradient and parameter.grad is None for parameter in base.values())
    before, after = state_of(case.started), state_of(model)
    assert same_bits({name: before[name] for name in base}, {name: after[name] for name in base})
    assert any(not np.array_equal(after[name], before[name]) for name in after.keys() - base.keys())


def test_from_pretrained_restores_the_same_bits(case: Case, folder: Path):
    loaded = PeftModel.from_pretrained(case.base(), folder)
    assert type(loaded) is type(case.trained)
    assert same_bits(arrays(case.trained.adapter_state()), arrays(loaded.adapter_state()))
    assert np.array_equal(logits_of(loaded), case.trained_logits)


@once_per_method
def test_load_weights_over_another_start_restores_saved_adapter(case: Case, folder: Path):
    """Check also that a start by another seed differs, before the adapter is loaded."""
    other = case.new(seed=7)
    start = arrays(case.started.adapter_state())
    assert same_bits(start, arrays(other.adapter_state())) == (case.name in SAME_START_FOR_EVERY_SEED)
    other.load_weights(folder)
    assert np.array_equal(logits_of(other), case.trained_logits)


@once_per_method
def test_get_peft_model_with_path_starts_from_saved_adapter(case: Case, folder: Path):
    warm = get_peft_model(case.base(), PEFT_METHODS.get(case.method.switch)(path=str(folder)))
    warm.eval()
    assert np.array_equal(logits_of(warm), case.trained_logits)
    assert any(not parameter.stop_gradient for parameter in warm.parameters())


def test_merge_and_unload_keeps_logits(case: Case, tmp_path: Path):
    model = case.new_trained()
    if not PEFT_METHODS.get(case.method.switch).mergeable:
        with pytest.raises(ValueError, match="cannot be merged"):
            model.merge_and_unload()
        return
    merged = model.merge_and_unload()
    logits = logits_of(merged)
    assert merged.state_dict().keys() == plain_base(case.family).state_dict().keys()
    np.testing.assert_allclose(logits, case.trained_logits, rtol=0, atol=case.tolerance)
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.eval()
    assert np.array_equal(logits_of(loaded), logits)


def test_disable_adapter_gives_base_logits(case: Case):
    with case.trained.disable_adapter():
        assert np.array_equal(logits_of(case.trained), case.base_logits)
    assert np.array_equal(logits_of(case.trained), case.trained_logits)


def test_enable_recompute_keeps_gradients(case: Case):
    """Rounding differs, because a recomputed mixer also runs as a training block if its input needs no gradient."""
    model, gradients = case.new_trained(), []
    model.train()
    for recompute in (False, True):
        if recompute:
            model.enable_recompute()
        paddle.seed(0)
        loss_of(model).backward()
        gradients.append({name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None})
        for parameter in model.parameters():
            parameter.clear_gradient(False)
    assert gradients[0]
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        np.testing.assert_allclose(gradients[1][name], gradients[0][name], rtol=1e-5, atol=3e-6, err_msg=name)


def test_forward_packed_documents_match_single_documents(case: Case):
    model, packed = case.trained, paddle.to_tensor(INPUT_IDS.reshape(1, -1))
    length = INPUT_IDS.shape[1]
    with paddle.no_grad():
        together = model(packed, document_lengths=((length, length),)).numpy()
    np.testing.assert_allclose(
        together.reshape(case.trained_logits.shape), case.trained_logits, rtol=0, atol=case.tolerance
    )


def test_forward_answers_that_continue_one_prompt_match_separate_rows(case: Case):
    model = case.trained
    ids, answers = paddle.to_tensor(INPUT_IDS), (slice(7, 9), slice(9, 11))
    reads_prompts = PEFT_METHODS.get(case.method.switch).reads_prompts
    shared, alone = ({"prompt_lengths": [[8] * n] * 2} if reads_prompts else {} for n in (3, 1))
    with paddle.no_grad():
        together = model.hidden_states(
            ids, document_lengths=[[7, 2, 2]] * 2, document_parents=[[None, 0, 0]] * 2, **shared
        )
        for answer in answers:
            row = paddle.concat([ids[:, :7], ids[:, answer]], axis=1)
            expected = model.hidden_states(row, **alone)
            np.testing.assert_allclose(together[:, :7].numpy(), expected[:, :7].numpy(), rtol=0, atol=case.tolerance)
            np.testing.assert_allclose(
                together[:, answer].numpy(), expected[:, 7:].numpy(), rtol=0, atol=case.tolerance
            )


def test_kv_cache_decoding_matches_full_forward(case: Case):
    """Compare a full forward pass with a prompt of 8 tokens and cached steps of one token."""
    cache = KVCache([0] * len(INPUT_IDS))
    ids, model = paddle.to_tensor(INPUT_IDS), case.trained
    reads_prompts = PEFT_METHODS.get(case.method.switch).reads_prompts
    prompts = {"prompt_lengths": [[8]] * len(INPUT_IDS)} if reads_prompts else {}
    with paddle.no_grad():
        expected = model(ids, **prompts).numpy()
        parts = [model(ids[:, :8], cache=cache).numpy()]
        parts += [model(ids[:, i : i + 1], cache=cache).numpy() for i in range(8, ids.shape[1])]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=case.tolerance, atol=case.tolerance)


@once_per_method
def test_get_peft_model_start_ignores_the_seed_of_paddle(case: Case):
    paddle.seed(2)
    assert same_bits(arrays(case.started.adapter_state()), arrays(case.new().adapter_state()))


@once_per_method
def test_get_peft_model_unknown_target_suggests_the_nearest(case: Case):
    switch = case.method.switch
    if "target_modules" not in {field.name for field in dataclasses.fields(PEFT_METHODS.get(switch))}:
        pytest.skip(f"{switch} has no targets to choose")
    typos = {"ln_tuning": ("nrom", "norm"), "trainable_tokens": ("embed_token", "embed_tokens")}
    typo, name = typos.get(switch, ("o_porj", "o_proj"))
    with pytest.raises(ValueError, match=rf"_target_modules: '{typo}' matches no .*did you mean '{name}'"):
        get_peft_model(plain_base(case.family), default_config(switch, target_modules=[typo]))


@once_per_method
def test_get_peft_model_second_adapter_raises(case: Case):
    with pytest.raises(ValueError, match="already has an adapter"):
        get_peft_model(case.started.base_model, case.method.config())


@once_per_method
def test_load_tensors_mismatch_lists_missing_unexpected_and_misshapen(case: Case, tmp_path: Path):
    model = case.started
    state = model.adapter_state()
    lost, *_, bent = [*state, *state]
    tensors = arrays(state)
    tensors[bent] = np.concatenate([tensors[bent], tensors[bent]])
    tensors["model.layers.9.stranger"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError) as raised:
        model.load_tensors(tensors, str(tmp_path))
    assert f"1 misshapen: {bent} (stored" in str(raised.value)
    del tensors[lost]
    with pytest.raises(ValueError) as raised:
        model.load_tensors(tensors, str(tmp_path))
    message = str(raised.value)
    assert f"1 missing: {lost}" in message
    assert "1 unexpected: model.layers.9.stranger" in message
    assert lost == bent or f"1 misshapen: {bent} (stored" in message


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_method_that_does_not_adapt_experts_refuses_them(switch: str):
    """Check both ways to name experts, as a module and as a parameter."""
    method, base = PEFT_METHODS.get(switch), plain_base("experts")
    if "target_modules" in {field.name for field in dataclasses.fields(method)}:
        with pytest.raises(ValueError, match=r"_target_modules: 'mlp.experts' matches no "):
            get_peft_model(base, default_config(switch, target_modules=["mlp.experts"]))
    if switch != "lora":
        with pytest.raises(ValueError, match=r"target_parameters.* is not available"):
            default_config(switch, target_parameters=["mlp.experts.down_proj"])
