"""Adapters of reward models: PEFT's layout with the score head, and adapters of the other task."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest

from paddlenlp_ext.api import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, merge_adapter
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.models.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from paddlenlp_ext.peft.methods.ia3 import IA3Config
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from tests.common.models import TINY_LLAMA

IDS = paddle.to_tensor(np.random.default_rng(0).integers(0, 61, (2, 9)))


@pytest.fixture
def base(tmp_path):
    AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def moved(base, config, quantization=None):
    """Return an adapted reward model whose trained parameters have been changed."""
    reward = AutoModelForSequenceClassification.from_pretrained(base, quantization_config=quantization)
    model = get_peft_model(reward, config)
    paddle.seed(0)
    for parameter in model.parameters():
        if not parameter.stop_gradient:
            parameter.set_value(parameter + 0.1 * paddle.randn(parameter.shape))
    model.eval()
    return model


@pytest.mark.parametrize(
    "config",
    [LoRAConfig(rank=2), IA3Config(), PrefixTuningConfig(num_tokens=3), ReFTConfig(rank=2)],
    ids=lambda config: config.peft_type,
)
def test_adapter_of_a_reward_model_has_its_head_and_loads_again(base, config, tmp_path):
    model = moved(base, config)
    assert not model.base_model.score.weight.stop_gradient
    model.save_pretrained(tmp_path / "adapter")
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert fields["task_type"] == "SEQ_CLS" and fields["modules_to_save"] == ["score"]
    again = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    np.testing.assert_array_equal(again(IDS).numpy(), model(IDS).numpy())


def test_lora_of_a_reward_model_has_the_keys_of_peft(base, tmp_path):
    moved(base, LoRAConfig(rank=2, target_modules=["q_proj"], task_type="SEQ_CLS")).save_pretrained(tmp_path)
    names = open_weights(tmp_path / "adapter_model.safetensors").names()
    layers = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{ab}.weight" for n in (0, 1) for ab in "AB"}
    assert set(names) == {*layers, "base_model.model.score.weight"}


def test_embedding_of_a_reward_model_is_tied_to_no_head(base, tmp_path):
    """Train the embedding over a model that ties it to lm_head, which a reward model does not have."""
    moved(base, LoRAConfig(rank=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])).save_pretrained(
        tmp_path
    )
    names = open_weights(tmp_path / "adapter_model.safetensors").names()
    replaced = {name for name in names if "lora" not in name}
    assert replaced == {"base_model.model.score.weight", "base_model.model.model.embed_tokens.weight"}


def test_modules_of_peft_that_no_model_has_are_left_out(base, tmp_path):
    """Load a file of Hugging Face PEFT, which lists the heads of all classifiers."""
    model = moved(base, LoRAConfig(rank=2))
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**fields, "modules_to_save": ["classifier", "score"]}))
    again = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again(IDS).numpy(), model(IDS).numpy())


def test_adapters_of_the_other_task_are_refused(base, tmp_path):
    moved(base, LoRAConfig(rank=2)).save_pretrained(tmp_path / "reward")
    with pytest.raises(ValueError, match="the adapter belongs to a reward model"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "reward")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoRAConfig(rank=2)).save_pretrained(tmp_path / "sft")
    for load in (
        lambda model: PeftModel.from_pretrained(model, tmp_path / "sft"),
        lambda model: get_peft_model(model, LoRAConfig(rank=2, path=str(tmp_path / "sft"))),
    ):
        with pytest.raises(ValueError, match="the adapter has no score head"):
            load(AutoModelForSequenceClassification.from_pretrained(base))


def test_run_from_a_reward_adapter_continues_its_head(base, tmp_path):
    first = moved(base, LoRAConfig(rank=2))
    first.save_pretrained(tmp_path)
    other = AutoModelForSequenceClassification.from_pretrained(base, seed=9)
    again = get_peft_model(other, LoRAConfig(rank=2, path=str(tmp_path)))
    np.testing.assert_array_equal(again.base_model.score.weight.numpy(), first.base_model.score.weight.numpy())
    assert not again.base_model.score.weight.stop_gradient


@pytest.mark.parametrize("quantization", [None, QuantizationConfig(algo="nf4")], ids=["plain", "nf4"])
def test_merged_adapter_of_a_reward_model_has_its_scores(base, tmp_path, quantization):
    model = moved(base, LoRAConfig(rank=2), quantization)
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(merged(IDS).numpy(), model(IDS).numpy(), rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["id2label"] == {"0": "LABEL_0"}
    names = open_weights(tmp_path / "merged").names()
    assert "score.weight" in names and "lm_head.weight" not in names
