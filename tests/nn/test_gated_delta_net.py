"""Gated delta nets: layers with the mixer, dtypes, and adapters."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import LazyTensor, SafetensorsFile, write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.attention import AttentionLayer
from paddlenlp_ext.nn.gated_delta_net import GatedDeltaNet
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.arrays import normal
from tests.common.models import slow_decays
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model

FAMILY = "qwen3_5_gated_delta"


def new_model(**changes):
    return slow_decays(AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[FAMILY], **changes}))


def test_decoder_layers_have_the_mixers_of_the_interval():
    layers = tiny_model(FAMILY).model.layers
    assert isinstance(layers[0].linear_attn, GatedDeltaNet) and isinstance(layers[1].self_attn, AttentionLayer)


def test_parameters_of_decays_and_norm_are_float32_in_a_bfloat16_model():
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[FAMILY]}, dtype="bfloat16")
    mixer = model.model.layers[0].linear_attn
    assert mixer.in_proj_qkv.weight.dtype == paddle.bfloat16
    for parameter in (mixer.A_log, mixer.dt_bias, mixer.norm.weight):
        assert parameter.dtype == paddle.float32


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_lora_of_a_gated_delta_net_has_the_names_of_peft(prefix, tmp_path):
    """Test that an adapter is stored under the names of the text model, and loads also under its composite's names."""
    targets = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
    model = get_peft_model(new_model(), LoRAConfig(rank=3, target_modules=[*targets]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.set_value(normal(len(name), *parameter.shape))
    model.save_pretrained(tmp_path)
    source = SafetensorsFile(tmp_path / "adapter_model.safetensors")
    start, tensors = "base_model.model.model.layers.0.linear_attn.", {}
    assert {name.removeprefix(start).split(".")[0] for name in source.names()} == targets
    for name in source.names():
        values = source.read(name).copy()
        stored = name.replace("base_model.model.model.", f"base_model.model.{prefix}")
        tensors[stored] = LazyTensor(values.shape, "float32", lambda values=values: values)
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    fields = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    fields["target_modules"] = [f"{prefix}layers.0.linear_attn.{name}" for name in targets]
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    again, ids = PeftModel.from_pretrained(new_model(), tmp_path), paddle.to_tensor(random_prompts((9,)))
    with paddle.no_grad():
        np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())
        assert np.abs(again(ids).numpy() - new_model()(ids).numpy()).max() > 0.1
