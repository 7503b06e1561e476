"""Adapters over a base with other config keys (long-sequence strategies, vocabulary): prediction, merging, loading."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.api import AutoPeftModelForCausalLM, merge_adapter
from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.cli.predict import load_predictor
from paddlenlp_ext.cli.predict_arguments import parse_arguments
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.models import ODD_SIZES

CONFIG = {"model_type": "llama", **ODD_SIZES, "max_position_embeddings": 16}
IDS = paddle.to_tensor(np.random.default_rng(1).integers(0, 61, (2, 40)))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OVERRIDES = {
    "YaRN": {"max_position_embeddings": 64, "rope_scaling": YARN},
    "vocabulary": {"vocab_size": 70, "max_position_embeddings": 64},
    "ALiBi": {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "alibi"}},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(CONFIG, seed=3).save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).write_text("{}")
    return tmp_path / "base"


def logits(model: paddle.nn.Layer) -> np.ndarray:
    model.eval()
    with paddle.no_grad():
        return model(IDS).numpy()


def train_adapter(base: Path, folder: Path, overrides: dict) -> np.ndarray:
    """Save a LoRA adapter with random values over the extended base; return its logits."""
    model = AutoModelForCausalLM.from_pretrained(base, config_overrides=overrides)
    model = get_peft_model(model, LoRAConfig(rank=3))
    paddle.seed(0)
    for tensor in model.parameters():
        if not tensor.stop_gradient:
            tensor.set_value(tensor + 0.1 * paddle.randn(tensor.shape))
    model.save_pretrained(folder)
    return logits(model)


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_adapter_with_a_strategy_reaches_prediction_and_merging(base, tmp_path, overrides):
    expected = train_adapter(base, tmp_path / "adapter", overrides)
    plain = AutoModelForCausalLM.from_pretrained(base)
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert fields["base_config_overrides"] == overrides

    arguments = parse_arguments(["--model_name_or_path", str(base), "--src_length", "40", "--max_length", "20"])
    predicting = load_predictor(arguments, str(base), str(tmp_path / "adapter"))
    np.testing.assert_allclose(logits(predicting), expected, atol=1e-5)
    np.testing.assert_array_equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), expected)

    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert read_model_config(tmp_path / "merged").items() >= overrides.items()
    np.testing.assert_allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, atol=1e-5)
    assert np.abs(logits(plain) - expected[..., :61]).max() > 1e-2


def test_adapter_with_a_strategy_over_a_plain_base_raises(base, tmp_path):
    train_adapter(base, tmp_path / "adapter", OVERRIDES["YaRN"])
    message = r'"rope_scaling": {"rope_type": "yarn".* this base has .*"max_position_embeddings": 16'
    plain = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(plain, tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):
        get_peft_model(plain, LoRAConfig(path=str(tmp_path / "adapter")))
    with pytest.raises(ValueError, match=message):
        get_peft_model(plain, LoRAConfig(rank=3)).load_weights(tmp_path / "adapter")


def test_adapter_resumed_with_a_new_strategy_raises_and_started_from_it_does_not(base, tmp_path):
    train_adapter(base, tmp_path / "adapter", {})
    extended = AutoModelForCausalLM.from_pretrained(base, config_overrides=OVERRIDES["YaRN"])
    model = get_peft_model(extended, LoRAConfig(path=str(tmp_path / "adapter")))
    with pytest.raises(ValueError, match='"rope_scaling": "as stored"'):
        model.load_weights(tmp_path / "adapter")
