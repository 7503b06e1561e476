"""Prompt tuning: vectors before every document, initialization, training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods import prompt_tuning
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.trainer.neftune import EmbeddingNoise
from tests.common.adapters import FAMILIES, INPUT_IDS, logits_of, loss_of, tiny_model, train
from tests.generation.engine_answers import Answer, engine_of, run

WINDOWED = {**FAMILIES["llama"], "model_type": "mistral", "sliding_window": 5}


def prompted(base: paddle.nn.Layer | None = None, **options: object) -> PeftModel:
    model = get_peft_model(base or tiny_model(), PromptTuningConfig(**{"num_tokens": 4, **options}))
    model.eval()
    return model


@pytest.mark.parametrize("family", [*FAMILIES, "windowed"])
def test_prompt_hidden_states_equal_decoder_with_vectors_before_tokens(family: str):
    """Initialize the vectors from tokens: they act as these tokens before every document of a pack."""
    base = AutoModelForCausalLM.from_config(WINDOWED if family == "windowed" else FAMILIES[family], seed=3)
    base.eval()
    known = [7, 11, 13, 17]
    ids = paddle.to_tensor(INPUT_IDS)
    with paddle.no_grad():
        before = paddle.to_tensor([known] * len(INPUT_IDS))
        expected = base(paddle.concat([before, ids], axis=1)).numpy()[:, 4:]
        model = prompted(base)
        model.base_model.model.embed_tokens.init_from_tokens(np.array(known))
        np.testing.assert_allclose(model(ids).numpy(), expected, rtol=0, atol=1e-5)
        positions = paddle.to_tensor(np.tile(np.arange(11), (2, 1)))
        np.testing.assert_allclose(model(ids, position_ids=positions).numpy(), expected, rtol=0, atol=1e-5)
        packed = model(ids.reshape([1, -1]), document_lengths=((11, 11),)).numpy()
        np.testing.assert_allclose(packed.reshape(expected.shape), expected, rtol=0, atol=1e-5)


def test_prompt_training_lowers_loss():
    model = prompted(num_tokens=6)
    before = float(loss_of(model))
    train(model, steps=60)
    assert float(loss_of(model)) < 0.9 * before


@pytest.mark.parametrize("family", ["llama", "convolutions"])
def test_prompt_generate_matches_logits(family: str):
    """Compare greedy decoding of prompts of unequal lengths with the logits, with drafts, and with the engine."""
    model = prompted(tiny_model(family))
    prompts = [INPUT_IDS[0, :3].tolist(), INPUT_IDS[1, :9].tolist(), INPUT_IDS[1, :5].tolist()]
    generated = model.generate(prompts, max_new_tokens=4, eos_token_id=None)
    for prompt_ids, tokens in zip(prompts, generated, strict=True):
        with paddle.no_grad():
            logits = model(paddle.to_tensor([prompt_ids + tokens[:-1]])).numpy()[0]
        assert logits[len(prompt_ids) - 1 :].argmax(-1).tolist() == tokens
    drafts = {"max_draft_tokens": 3, "max_ngram_size": 2, "batch_size": 1}
    assert model.generate(prompts, max_new_tokens=4, eos_token_id=None, **drafts) == generated
    answers = [Answer(prompt, 4) for prompt in prompts]
    run(engine_of(model, max_rows=2, prompt_tokens_per_step=4), answers, steps_between=1)
    assert [answer.tokens for answer in answers] == generated


def test_prompt_with_neftune_trains():
    """Check that noise is added to tokens only, scaled by the lengths of their documents."""
    model = prompted().train()
    noise = EmbeddingNoise(model, alpha=5.0)
    without_noise = float(loss_of(model))
    with noise.documents(((11,), (11,))):
        paddle.seed(0)
        assert float(loss_of(model)) != without_noise
    assert float(loss_of(model)) == without_noise


def test_prompt_init_sets_initial_vectors():
    table = tiny_model().model.embed_tokens.weight.numpy()
    drawn = prompted().adapter_state()["model.embed_tokens.prompt_embeddings"].numpy()
    assert all((table == row).all(axis=1).any() for row in drawn), "each vector must be a token's embedding"
    noise = prompted(num_tokens=50, init="random").adapter_state()["model.embed_tokens.prompt_embeddings"].numpy()
    assert 0.8 * table.std() < noise.std() < 1.25 * table.std()


def test_prompt_init_text_is_truncated_or_repeated(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(
        prompt_tuning, "load_tokenizer", lambda name: asked.append(name) or (lambda text: {"input_ids": [3, 5, 9]})
    )
    table = tiny_model().model.embed_tokens.weight.numpy()
    for num_tokens, expected in ((2, [3, 5]), (4, [3, 5, 9, 3])):
        model = prompted(num_tokens=num_tokens, init="text", init_text="do it", tokenizer_name_or_path="somewhere")
        vectors = model.adapter_state()["model.embed_tokens.prompt_embeddings"].numpy()
        assert np.array_equal(vectors, table[expected])
    assert asked == ["somewhere"] * 2
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        prompted(init="text", init_text="do it")


def test_prompt_warm_start_needs_no_text(tmp_path: Path):
    model = prompted(num_tokens=3)
    train(model, steps=2)
    model.save_pretrained(tmp_path)
    warm = prompted(path=str(tmp_path), init="text", init_text="not asked again")
    assert warm.peft_config.num_tokens == 3
    assert np.array_equal(logits_of(warm), logits_of(model))


def test_prompt_lazy_model_needs_no_weights():
    with paddle.LazyGuard():
        model = get_peft_model(AutoModelForCausalLM.from_config(FAMILIES["llama"]), PromptTuningConfig(num_tokens=4))
    (trained,) = [p for p in model.parameters() if not p.stop_gradient]
    assert trained.shape == [4, 36]


def test_merge_files_prompt_raises(tmp_path: Path):
    prompted().save_pretrained(tmp_path / "prompt")
    with pytest.raises(ValueError, match=r"PROMPT_TUNING .*cannot be merged"):
        merge_adapter(tmp_path / "prompt", tmp_path / "merged", AutoModelForCausalLM.from_pretrained, base="nowhere")


def test_prompt_document_lengths_not_matching_rows_raise():
    with pytest.raises(ValueError, match="do not add up"):
        prompted()(paddle.to_tensor(INPUT_IDS), document_lengths=((11,), (10,)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 0}, "num_tokens: 0 is out of range"),
        ({"init": "words"}, 'init: "words" is not one of: vocab, random, text'),
        ({"init": "text"}, "to 'text' and pass a text"),
        ({"init_text": "do it"}, "to 'text' and pass a text"),
    ],
)
def test_prompt_config_value_out_of_range_raises(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        PromptTuningConfig(**options)
