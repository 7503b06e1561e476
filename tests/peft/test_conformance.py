"""Requirements of every PEFT method, tested for the registry, so that a new method needs no edit here."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.kv_cache import KVCache
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import (
    CHANGES_LOGITS_AT_START,
    FAMILIES,
    INPUT_IDS,
    default_config,
    logits_of,
    loss_of,
    same_bits,
    state_of,
    tiny_model,
    train,
)

pytestmark = [pytest.mark.parametrize("switch", PEFT_METHODS.names()), pytest.mark.parametrize("family", FAMILIES)]
TOLERANCE = 1e-5
SAME_START_FOR_EVERY_SEED = (
    *("boft", "ia3", "ln_tuning", "miss", "oft", "olora"),
    *(
        "pissa",
        "toy_rows",
        "trainable_tokens",
        "use_mora",
    ),
)


def adapted(switch: str, family: str, seed: int = 42) -> PeftModel:
    model = get_peft_model(tiny_model(family), default_config(switch), seed=seed)
    model.eval()
    return model


def trained(switch: str, family: str) -> PeftModel:
    """Return a new model whose trained adapter changes the logits clearly."""
    model, values = adapted(switch, family), trained_values(switch, family)
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.set_value(values[name])
    return model


@functools.cache
def trained_values(switch: str, family: str) -> dict[str, np.ndarray]:
    """Train an adapter once for all tests; return its parameters."""
    model = adapted(switch, family)
    train(model, steps=3)
    assert np.abs(logits_of(model) - logits_of(tiny_model(family))).max() > 100 * TOLERANCE
    return {name: parameter.numpy() for name, parameter in model.named_parameters() if not parameter.stop_gradient}


def arrays(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def test_get_peft_model_starts_as_base(switch: str, family: str):
    started, base = logits_of(adapted(switch, family)), logits_of(tiny_model(family))
    if switch not in CHANGES_LOGITS_AT_START:
        np.testing.assert_allclose(started, base, atol=TOLERANCE)
    else:
        assert np.abs(started - base).max() > TOLERANCE, (
            f"{switch} starts as the base; remove it from CHANGES_LOGITS_AT_START"
        )


def test_training_changes_only_the_adapter(switch: str, family: str):
    model = adapted(switch, family)
    adapter = {id(tensor) for tensor in model.adapter_state().values()}
    base = {name: p for name, p in model.named_parameters() if id(p) not in adapter}
    assert base
    assert len(base) == len(tiny_model(family).parameters())
    assert all(parameter.stop_gradient for parameter in base.values())
    before, adapter_before = arrays(base), state_of(model)
    before = {name: value.copy() for name, value in before.items()}
    train(model)
    assert same_bits(before, arrays(base))
    assert all(parameter.grad is None for parameter in base.values())
    after = state_of(model)
    assert any(not np.array_equal(after[name], adapter_before[name]) for name in after.keys() - before.keys())


def test_from_pretrained_restores_the_same_bits(switch: str, family: str, tmp_path: Path):
    model = trained(switch, family)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(family), tmp_path)
    assert type(loaded) is type(model)
    assert same_bits(arrays(model.adapter_state()), arrays(loaded.adapter_state()))
    assert np.array_equal(logits_of(loaded), logits_of(model))


def test_load_weights_restores_saved_adapter(switch: str, family: str, tmp_path: Path):
    model = trained(switch, family)
    model.save_pretrained(tmp_path)
    other = adapted(switch, family, seed=7)
    other.load_weights(tmp_path)
    assert np.array_equal(logits_of(other), logits_of(model))


def test_get_peft_model_with_path_starts_from_saved_adapter(switch: str, family: str, tmp_path: Path):
    model = trained(switch, family)
    model.save_pretrained(tmp_path)
    warm = get_peft_model(tiny_model(family), PEFT_METHODS.get(switch)(path=str(tmp_path)))
    warm.eval()
    assert np.array_equal(logits_of(warm), logits_of(model))
    assert any(not parameter.stop_gradient for parameter in warm.parameters())


def test_merge_and_unload_keeps_logits(switch: str, family: str, tmp_path: Path):
    model = trained(switch, family)
    before = logits_of(model)
    if not PEFT_METHODS.get(switch).mergeable:
        with pytest.raises(ValueError, match="cannot be merged"):
            model.merge_and_unload()
        return
    merged = model.merge_and_unload()
    assert state_of(merged).keys() == state_of(tiny_model(family)).keys()
    np.testing.assert_allclose(logits_of(merged), before, rtol=0, atol=TOLERANCE)
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.eval()
    assert np.array_equal(logits_of(loaded), logits_of(merged))


def test_disable_adapter_gives_base_logits(switch: str, family: str):
    model = trained(switch, family)
    on = logits_of(model)
    with model.disable_adapter():
        assert np.array_equal(logits_of(model), logits_of(tiny_model(family)))
    assert np.array_equal(logits_of(model), on)


def test_enable_recompute_keeps_gradients(switch: str, family: str):
    gradients = []
    for recompute in (False, True):
        model = trained(switch, family)
        model.train()
        if recompute:
            model.enable_recompute()
        paddle.seed(0)
        loss_of(model).backward()
        gradients.append({name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0]
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        np.testing.assert_allclose(gradients[1][name], gradients[0][name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_forward_packed_documents_match_single_documents(switch: str, family: str):
    model = trained(switch, family)
    packed = paddle.to_tensor(INPUT_IDS.reshape(1, -1))
    length = INPUT_IDS.shape[1]
    with paddle.no_grad():
        together = model(packed, document_lengths=((length, length),)).numpy()
    np.testing.assert_allclose(together.reshape(logits_of(model).shape), logits_of(model), rtol=0, atol=TOLERANCE)


def test_forward_answers_that_continue_one_prompt_match_separate_rows(switch: str, family: str):
    model = trained(switch, family)
    ids, answers = paddle.to_tensor(INPUT_IDS), (slice(7, 9), slice(9, 11))
    reads_prompts = PEFT_METHODS.get(switch).reads_prompts
    shared, alone = ({"prompt_lengths": [[8] * n] * 2} if reads_prompts else {} for n in (3, 1))
    with paddle.no_grad():
        together = model.hidden_states(
            ids, document_lengths=[[7, 2, 2]] * 2, document_parents=[[None, 0, 0]] * 2, **shared
        )
        for answer in answers:
            row = paddle.concat([ids[:, :7], ids[:, answer]], axis=1)
            expected = model.hidden_states(row, **alone)
            np.testing.assert_allclose(together[:, :7].numpy(), expected[:, :7].numpy(), rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(together[:, answer].numpy(), expected[:, 7:].numpy(), rtol=0, atol=TOLERANCE)


def test_kv_cache_decoding_matches_full_forward(switch: str, family: str):
    model = trained(switch, family)
    cache = KVCache([0] * len(INPUT_IDS))
    ids = paddle.to_tensor(INPUT_IDS)
    prompts = {"prompt_lengths": [[6]] * len(INPUT_IDS)} if PEFT_METHODS.get(switch).reads_prompts else {}
    with paddle.no_grad():
        expected = model(ids, **prompts).numpy()
        parts = [model(ids[:, :6], cache=cache).numpy()]
        parts += [model(ids[:, i : i + 1], cache=cache).numpy() for i in range(6, ids.shape[1])]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=0, atol=TOLERANCE)


def test_get_peft_model_start_depends_only_on_seed(switch: str, family: str):
    paddle.seed(1)
    one = arrays(adapted(switch, family).adapter_state())
    paddle.seed(2)
    assert same_bits(one, arrays(adapted(switch, family).adapter_state()))
    other = arrays(adapted(switch, family, seed=7).adapter_state())
    assert same_bits(one, other) == (switch in SAME_START_FOR_EVERY_SEED)


def test_get_peft_model_unknown_target_suggests_the_nearest(switch: str, family: str):
    method = PEFT_METHODS.get(switch)
    if "target_modules" not in {field.name for field in dataclasses.fields(method)}:
        pytest.skip(f"{switch} has no targets to choose")
    typos = {"ln_tuning": ("imput_layernorm", "input_layernorm"), "trainable_tokens": ("embed_token", "embed_tokens")}
    typo, name = typos.get(switch, ("q_porj", "q_proj"))
    with pytest.raises(ValueError, match=rf"_target_modules: '{typo}' matches no .*did you mean '{name}'"):
        get_peft_model(tiny_model(family), default_config(switch, target_modules=[typo]))


def test_get_peft_model_second_adapter_raises(switch: str, family: str):
    model = adapted(switch, family)
    with pytest.raises(ValueError, match="already has an adapter"):
        get_peft_model(model.base_model, default_config(switch))


def test_load_tensors_mismatch_lists_missing_unexpected_and_misshapen(switch: str, family: str, tmp_path: Path):
    model = adapted(switch, family)
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
