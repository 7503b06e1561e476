"""Nemotron H: spellings of config.json, names in files, adapters, and layers with a single block."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.smoothing_mappings import smoothing_mappings
from paddlenlp_ext.nn.attention import AttentionLayer
from paddlenlp_ext.nn.experts import MixtureOfExperts
from paddlenlp_ext.nn.mamba2 import Mamba2
from paddlenlp_ext.nn.ungated_feed_forward import UngatedFeedForward
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.arrays import normal
from tests.common.models import TINY_SINGLE_BLOCKS, slow_decays
from tests.generation.tiny_models import SIZES, random_prompts

CONFIG = {**SIZES, **TINY_SINGLE_BLOCKS}


def new_model(**changes):
    return slow_decays(AutoModelForCausalLM.from_config({**CONFIG, **changes}))


def parameters_of(model):
    return {name: parameter.numpy() for name, parameter in model.named_parameters()}


def test_each_layer_has_one_block_of_the_pattern():
    model = new_model()
    kinds = [type(layer.mixer or layer.mlp) for layer in model.model.layers]
    assert [kind.__name__ for kind in kinds] == ["Mamba2", "MixtureOfExperts", "Attention", "UngatedFeedForward"]
    assert issubclass(kinds[0], Mamba2) and issubclass(kinds[2], AttentionLayer)
    assert kinds[1] is MixtureOfExperts and kinds[3] is UngatedFeedForward
    assert all((layer.mixer is None) != (layer.mlp is None) for layer in model.model.layers)


@pytest.mark.parametrize(
    "spelling",
    [
        {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 52},
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "num_hidden_layers": None},
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "hybrid_override_pattern": "MM"},
        {},
    ],
)
def test_config_spellings_of_the_layers_are_equal(spelling):
    dropped = {"hybrid_override_pattern", "num_hidden_layers"}
    config = DecoderConfig.from_dict({**{key: CONFIG[key] for key in CONFIG.keys() - dropped}, **spelling})
    expected = DecoderConfig.from_dict(CONFIG)
    assert config.num_hidden_layers == 4
    assert [mixer and mixer.kind for mixer in config.mixers] == [mixer and mixer.kind for mixer in expected.mixers]
    assert config.experts == expected.experts and config.shapes == expected.shapes


def test_weights_per_layer_leave_out_absent_blocks():
    config = DecoderConfig.from_dict(CONFIG)
    attention, mamba = 32 * 8 * (4 + 4 + 2 * 2), config.mixers[0].num_weights
    assert config.attention_share == 0.25
    assert config.mixer_weights == pytest.approx((attention + mamba) / 4)
    assert config.active_size == pytest.approx((48 + 2 * 20 + 28) / 4)


def test_saved_model_has_the_names_of_published_files_and_loads_again(tmp_path):
    model = new_model()
    model.save_pretrained(tmp_path)
    files = open_weights(tmp_path)
    assert {name.split(".")[0] for name in files.names()} == {"backbone", "lm_head"}
    layer = "backbone.layers."
    assert files.shape("backbone.embeddings.weight") == (97, 32)
    assert files.shape("backbone.norm_f.weight") == files.shape(f"{layer}3.norm.weight") == (32,)
    assert files.shape(f"{layer}0.mixer.conv1d.weight") == (24 + 2 * 2 * 6, 1, 4)
    assert files.shape(f"{layer}0.mixer.A_log") == files.shape(f"{layer}0.mixer.D") == (4,)
    assert files.shape(f"{layer}1.mixer.experts.4.up_proj.weight") == (20, 32)
    assert files.shape(f"{layer}1.mixer.experts.4.down_proj.weight") == (32, 20)
    assert files.shape(f"{layer}1.mixer.shared_experts.up_proj.weight") == (28, 32)
    assert files.shape(f"{layer}1.mixer.gate.e_score_correction_bias") == (5,)
    assert files.shape(f"{layer}2.mixer.k_proj.weight") == (16, 32)
    assert files.shape(f"{layer}3.mixer.down_proj.weight") == (32, 48)
    again = parameters_of(AutoModelForCausalLM.from_pretrained(tmp_path))
    for name, values in parameters_of(model).items():
        np.testing.assert_array_equal(again[name], values, err_msg=name)


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_files_with_mtp_layers_load_under_either_prefix(prefix, tmp_path):
    model = new_model()
    model.save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    tensors = {name.replace("backbone.", prefix, 1): source.read(name).copy() for name in source.names()}
    tensors["mtp.layers.0.mixer.q_proj.weight"] = np.zeros((2, 2), np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    again = parameters_of(AutoModelForCausalLM.from_pretrained(tmp_path))
    for name, values in parameters_of(model).items():
        np.testing.assert_array_equal(again[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["mixer.in_proj", "out_proj"], {"0.mixer.in_proj", "0.mixer.out_proj"}),
        (["mixer.q_proj", "mixer.down_proj"], {"2.mixer.q_proj", "3.mixer.down_proj"}),
        (["up_proj"], {"1.mixer.shared_experts.up_proj", "3.mixer.up_proj"}),
    ],
)
def test_lora_has_the_names_of_peft(targets, layers, tmp_path):
    model = get_peft_model(new_model(), LoRAConfig(rank=3, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.set_value(normal(len(name), *parameter.shape))
    model.save_pretrained(tmp_path)
    start = "base_model.model.model.layers."
    assert set(SafetensorsFile(tmp_path / "adapter_model.safetensors").names()) == {
        f"{start}{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"
    }
    fields = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert not any("mamba" in target or "self_attn" in target for target in fields["target_modules"])
    again, ids = PeftModel.from_pretrained(new_model(), tmp_path), paddle.to_tensor(random_prompts((9,)))
    with paddle.no_grad():
        np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())
        assert np.abs(again(ids).numpy() - new_model()(ids).numpy()).max() > 0.01


def test_lora_of_experts_has_the_names_of_peft(tmp_path):
    parameters = ["experts.up_proj", "experts.down_proj"]
    model = get_peft_model(new_model(), LoRAConfig(rank=3, target_parameters=parameters))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.set_value(normal(len(name), *parameter.shape))
    model.save_pretrained(tmp_path)
    names = set(SafetensorsFile(tmp_path / "adapter_model.safetensors").names())
    start = "base_model.model.model.layers.1.mixer.experts."
    assert names >= {f"{start}base_layer.lora_A.weight", f"{start}lora_B.weight"}
    again, ids = PeftModel.from_pretrained(new_model(), tmp_path), paddle.to_tensor(random_prompts((9,)))
    with paddle.no_grad():
        np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())


def test_saved_experts_of_an_adapter_load_again(tmp_path):
    config = LoRAConfig(rank=3, target_modules=["o_proj"], modules_to_save=["mlp.experts"])
    model = get_peft_model(new_model(), config)
    for name, parameter in model.named_parameters():
        if name.endswith(".experts.up_proj.weight"):
            parameter.set_value(normal(len(name), *parameter.shape))
    model.save_pretrained(tmp_path)
    names = SafetensorsFile(tmp_path / "adapter_model.safetensors").names()
    assert "base_model.model.model.layers.1.mixer.experts.up_proj" in names
    again, ids = PeftModel.from_pretrained(new_model(), tmp_path), paddle.to_tensor(random_prompts((9,)))
    with paddle.no_grad():
        np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())


def test_smoothing_mappings_scale_the_readers_of_the_norm():
    first, second, third, fourth = (smoothing_mappings(layer) for layer in new_model().model.layers)
    assert [(each.producer, each.consumers) for each in first] == [("norm", ("mamba.in_proj",))]
    assert second == []  # squared ReLU is not linear in the output of up_proj
    assert [each.producer for each in third] == ["norm", "self_attn.v_proj"]
    assert [(each.producer, each.consumers) for each in fourth] == [("norm", ("mlp.up_proj",))]
