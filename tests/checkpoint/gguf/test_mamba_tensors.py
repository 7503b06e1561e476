"""Models with Mamba-2 layers in GGUF files: sizes in the metadata, and parts that llama.cpp does not compute."""

from __future__ import annotations

import pytest

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.models.gguf_export import architecture_for
from tests.checkpoint.gguf.llama_cpp_files import make_model, write_model


def test_config_from_gguf_reads_the_sizes_of_mamba_layers(tmp_path):
    path = write_model(make_model("granitehybrid"), "granitehybrid", tmp_path / "model.gguf")
    config = read_model_config(path)
    assert config["layer_types"] == ["mamba", "attention"] * 4
    assert (config["mamba_n_heads"], config["mamba_d_head"], config["mamba_expand"]) == (8, 16, 2)
    assert config["mamba_n_groups"] == 2 and config["num_key_value_heads"] == 2
    weights = open_weights(path)
    assert weights.shape("model.layers.0.mamba.A_log") == weights.shape("model.layers.0.mamba.D") == (8,)
    assert weights.shape("model.layers.0.mamba.norm.weight") == (128,)


@pytest.mark.parametrize(
    "changes", [{"mamba_proj_bias": True}, {"mamba_conv_bias": False}, {"time_step_limit": [0.0, 0.1]}]
)
def test_metadata_of_parts_that_llama_cpp_does_not_compute_raises(changes):
    config = make_model("granitehybrid", **changes).config
    with pytest.raises(ValueError, match=r"cannot express biases .*mamba_proj_bias.* limits .*time_step_limit"):
        architecture_for(config).metadata(config)
