"""Sequence classifiers: the new head, the files in the layout of transformers, and models that are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.models.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.models.registry import FAMILIES
from paddlenlp_ext.quantization.config import QuantizationConfig
from tests.common.models import TINY_LLAMA
from tests.common.training import assert_same_bits, weights
from tests.golden import DATA


@pytest.fixture
def base(tmp_path):
    """Save the tiny Llama, with an lm_head of its own and a hidden size that makes the head's statistics stable."""
    config = {**TINY_LLAMA, "hidden_size": 512, "intermediate_size": 16, "tie_word_embeddings": False}
    AutoModelForCausalLM.from_config(config, seed=1).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_new_score_head_is_drawn_by_the_seed(base):
    heads = [AutoModelForSequenceClassification.from_pretrained(base, seed=seed).score.weight for seed in (0, 0, 3)]
    first, again, other = (head.numpy() for head in heads)
    assert first.shape == (1, 512) and np.array_equal(first, again) and not np.array_equal(first, other)
    assert abs(first.mean()) < 0.03 and first.std() == pytest.approx(TINY_LLAMA["initializer_range"], rel=0.1)


def test_classifier_is_saved_as_transformers_does_and_loads_again(base, tmp_path):
    source = ModelSource.resolve(base).as_classifier(seed=5, pad_token_id=7)
    model = AutoModelForSequenceClassification.from_pretrained(source, seed=5)
    names = set(weights(model))
    assert "score.weight" in names and "lm_head.weight" not in names
    model.save_pretrained(tmp_path / "saved")
    assert set(open_weights(tmp_path / "saved").names()) == names
    assert not (tmp_path / "saved" / "generation_config.json").exists()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", seed=6)
    assert_same_bits(weights(again), weights(model))


def test_config_of_a_classifier_is_that_of_transformers(tmp_path):
    expected = json.loads((DATA / "reward_config.json").read_text())
    AutoModelForCausalLM.from_config(TINY_LLAMA).save_pretrained(tmp_path / "base")
    source = ModelSource.resolve(tmp_path / "base").as_classifier(0, expected["pad_token_id"])
    AutoModelForSequenceClassification.from_pretrained(source).save_pretrained(tmp_path / "saved")
    found = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {key: found.get(key) for key in expected} == expected
    assert found["tie_word_embeddings"] is True


def test_classifier_of_a_quantized_base_has_its_head_in_full_precision(base):
    model = AutoModelForSequenceClassification.from_pretrained(base, quantization_config=QuantizationConfig(algo="nf4"))
    assert model.score.weight.shape == [1, 512] and model.quantization is not None


def test_classifier_with_several_labels_is_refused(base):
    config = json.loads((base / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has 3 labels"):
        AutoModelForSequenceClassification.from_pretrained(base)


def test_classifier_generates_nothing(base):
    with pytest.raises(ValueError, match="a reward model has no lm_head"):
        AutoModelForSequenceClassification.from_pretrained(base).generate([[1, 2]])


def test_classifier_architectures_are_names_of_classifiers():
    names = {name: FAMILIES.get(name).classifier_architecture for name in FAMILIES.names()}
    assert names["llama"] == "LlamaForSequenceClassification"
    assert names["gemma3_text"] == "Gemma3TextForSequenceClassification"
    assert all(name.endswith("ForSequenceClassification") for name in names.values())
