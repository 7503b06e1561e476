"""OLMo Hybrid: names in published files and in files of transformers, RoPE, and adapters."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.decoder_layers import PostNormLayer, PreNormLayer
from paddlenlp_ext.nn.gated_delta_net import SplitGatedDeltaNet
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.arrays import normal
from tests.common.models import TINY_SPLIT_DELTA, slow_decays
from tests.generation.tiny_models import SIZES, random_prompts

CONFIG = {**SIZES, **TINY_SPLIT_DELTA}


def new_model():
    return slow_decays(AutoModelForCausalLM.from_config(CONFIG))


def test_layers_with_a_delta_net_are_pre_norm_and_the_others_post_norm():
    first, second = AutoModelForCausalLM.from_config(CONFIG).model.layers
    assert type(first) is PreNormLayer and type(second) is PostNormLayer
    assert isinstance(first.linear_attn, SplitGatedDeltaNet)
    assert first.linear_attn.o_norm.epsilon == 1e-5 and first.input_layernorm.epsilon == 1e-6
    assert first.linear_attn.shape.beta_scale == 2


@pytest.mark.parametrize(
    ("rope", "rotates"),
    [({}, True), ({"rope_parameters": None}, True), ({"rope_parameters": {"rope_theta": None}}, False)],
)
def test_rope_is_absent_if_its_base_is_null(rope, rotates):
    source = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    assert DecoderConfig.from_dict({**source, **rope}).rotates == (rotates, rotates)


def test_default_sizes_are_derived_from_the_hidden_size():
    sizes = {**SIZES, "model_type": "olmo_hybrid", "num_hidden_layers": 5}
    mixers = DecoderConfig.from_dict(sizes).mixers
    assert [mixer is None for mixer in mixers] == [False, False, False, True, False]
    assert (mixers[0].num_key_heads, mixers[0].num_value_heads) == (4, 4)
    assert (mixers[0].key_dim, mixers[0].value_dim) == (6, 12)


def test_saved_model_has_the_names_of_published_files(tmp_path):
    model = new_model()
    model.save_pretrained(tmp_path)
    files = open_weights(tmp_path)
    layer = "model.layers.0.linear_attn."
    sizes = {name: files.shape(f"{layer}{name}_conv1d.weight") for name in "qkv"}
    assert sizes == {"q": (12, 1, 4), "k": (12, 1, 4), "v": (40, 1, 4)}
    norms = {name for name in files.names() if "norm" in name and "linear_attn" not in name}
    assert norms == {
        "model.layers.0.attention_layer_norm.weight",
        "model.layers.0.feedforward_layer_norm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.post_feedforward_layernorm.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.self_attn.k_norm.weight",
        "model.norm.weight",
    }
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(again[name].numpy(), parameter.numpy(), err_msg=name)


def test_files_written_by_transformers_load(tmp_path):
    """Test that transformers' thirds of a convolution, and its name of a norm in attention layers, are read."""
    model = new_model()
    model.save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    start, second = "model.layers.0.linear_attn.", "model.layers.1."
    tensors = {
        name.replace(f"{second}post_attention_layernorm", f"{second}feedforward_layer_norm"): source.read(name).copy()
        for name in source.names()
    }
    whole = np.concatenate([tensors[f"{start}{part}_conv1d.weight"] for part in "qkv"])
    thirds = dict(zip("qkv", (whole[:22], whole[22:44], whole[44:]), strict=True))
    tensors |= {f"{start}{part}_conv1d.weight": rows for part, rows in thirds.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(again[name].numpy(), parameter.numpy(), err_msg=name)


def test_lora_of_a_delta_net_has_the_names_of_peft(tmp_path):
    targets = {"q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "o_proj"}
    model = get_peft_model(new_model(), LoRAConfig(rank=3, target_modules=[*targets]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.set_value(normal(len(name), *parameter.shape))
    model.save_pretrained(tmp_path)
    start = "base_model.model.model.layers."
    layers = {f"0.linear_attn.{name}" for name in targets} | {f"1.self_attn.{name}_proj" for name in "qkvo"}
    assert set(SafetensorsFile(tmp_path / "adapter_model.safetensors").names()) == {
        f"{start}{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"
    }
    again, ids = PeftModel.from_pretrained(new_model(), tmp_path), paddle.to_tensor(random_prompts((9,)))
    with paddle.no_grad():
        np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())
        assert np.abs(again(ids).numpy() - new_model()(ids).numpy()).max() > 0.1
