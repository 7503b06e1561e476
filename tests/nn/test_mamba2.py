"""Mamba-2: layers with the mixer, dtypes, files, adapters, and methods that are not supported."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.nn.attention import AttentionLayer
from paddlenlp_ext.nn.mamba2 import GroupedRMSNorm, Mamba2
from paddlenlp_ext.parallel.tensor_parallel import check_sizes
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.arrays import normal
from tests.common.models import TINY_LLAMA, TINY_MAMBA, slow_decays
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model

FAMILY, EXPERTS = "granite_4_mamba2", "granite_4_mamba2_experts"


def new_model(family=FAMILY, **changes):
    return slow_decays(AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family], **changes}))


def test_decoder_layers_have_the_mixers_of_layer_types():
    layers = tiny_model(FAMILY).model.layers
    assert isinstance(layers[0].mamba, Mamba2) and isinstance(layers[1].self_attn, AttentionLayer)


def test_initial_decays_steps_and_skips_are_the_ones_of_transformers():
    mixer = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[FAMILY]}).model.layers[0].mamba
    np.testing.assert_allclose(mixer.A_log.numpy(), np.log([1, 2, 3, 4]), rtol=1e-6)
    assert (mixer.D.numpy() == 1).all() and (mixer.dt_bias.numpy() == 1).all()


def test_parameters_of_decays_and_norm_are_float32_in_a_bfloat16_model():
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[FAMILY]}, dtype="bfloat16")
    mixer = model.model.layers[0].mamba
    assert mixer.in_proj.weight.dtype == paddle.bfloat16
    for parameter in (mixer.A_log, mixer.D, mixer.dt_bias, mixer.norm.weight):
        assert parameter.dtype == paddle.float32
    with paddle.no_grad():
        assert np.isfinite(model(paddle.to_tensor(random_prompts((70,)))).astype("float32").numpy()).all()


def test_grouped_norm_divides_each_group_by_its_root_mean_square():
    norm, x = GroupedRMSNorm(6, 1e-5, 2), normal(0, 5, 6)
    norm.weight.set_value(normal(1, 6))
    squares = np.square(x.reshape(5, 2, 3)).mean(-1).repeat(3, axis=-1)
    expected = x / np.sqrt(squares + 1e-5) * norm.weight.numpy()
    np.testing.assert_allclose(norm(paddle.to_tensor(x)).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_limits_of_step_sizes_may_be_stored_like_in_transformers_5():
    config = new_model(time_step_limit=[0.0, {"__float__": "Infinity"}]).config
    assert config.other_mixers == tiny_model(FAMILY).config.other_mixers


def test_saved_model_has_the_names_of_published_files_and_loads_again(tmp_path):
    model = new_model(EXPERTS)
    model.save_pretrained(tmp_path)
    files = open_weights(tmp_path)
    layer = "model.layers.0."
    assert files.shape(f"{layer}mamba.conv1d.weight") == (64 + 2 * 2 * 6, 1, 4)
    assert files.shape(f"{layer}shared_mlp.input_linear.weight") == (96, 32)
    assert files.shape(f"{layer}block_sparse_moe.input_linear.weight") == (5, 96, 32)
    assert files.shape(f"{layer}block_sparse_moe.output_linear.weight") == (5, 32, 48)
    assert files.shape(f"{layer}block_sparse_moe.router.layer.weight") == (5, 32)
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(again[name].numpy(), parameter.numpy(), err_msg=name)


def test_lora_of_mamba2_has_the_names_of_peft(tmp_path):
    targets = {"in_proj", "out_proj"}
    model = get_peft_model(new_model(), LoRAConfig(rank=3, target_modules=[*targets]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.set_value(normal(len(name), *parameter.shape))
    model.save_pretrained(tmp_path)
    start = "base_model.model.model.layers.0.mamba."
    assert set(SafetensorsFile(tmp_path / "adapter_model.safetensors").names()) == {
        f"{start}{name}.lora_{matrix}.weight" for name in targets for matrix in "AB"
    }
    fields = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert {*fields["target_modules"]} == targets
    again, ids = PeftModel.from_pretrained(new_model(), tmp_path), paddle.to_tensor(random_prompts((9,)))
    with paddle.no_grad():
        np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())
        assert np.abs(again(ids).numpy() - new_model()(ids).numpy()).max() > 0.1


def test_lora_of_experts_beside_mamba2_has_the_names_of_peft(tmp_path):
    model = get_peft_model(new_model(EXPERTS), LoRAConfig(rank=3, target_parameters=["experts.down_proj"]))
    model.save_pretrained(tmp_path)
    names = set(SafetensorsFile(tmp_path / "adapter_model.safetensors").names())
    start = "base_model.model.model.layers.1.block_sparse_moe.experts."
    assert names >= {f"{start}lora_A.weight", f"{start}lora_B.weight"}


def test_check_sizes_requires_whole_groups_unless_there_is_one():
    sizes = {**TINY_LLAMA, **TINY_MAMBA, "num_key_value_heads": 4}
    with pytest.raises(ValueError, match=r"degree 4 does not divide number of Mamba-2 groups 2 of the model; .* is 2$"):
        check_sizes(DecoderConfig.from_dict(sizes), 4)
    check_sizes(DecoderConfig.from_dict({**sizes, "mamba_n_groups": 1}), 4)
    with pytest.raises(ValueError, match=r"degree 4 does not divide number of Mamba-2 heads 2 of the model"):
        check_sizes(DecoderConfig.from_dict({**sizes, "mamba_n_groups": 1, "mamba_n_heads": 2}), 4)
