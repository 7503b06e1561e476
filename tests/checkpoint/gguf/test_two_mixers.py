"""Models with two mixers per layer in GGUF files: config of a file, and parts that llama.cpp does not compute."""

from __future__ import annotations

import pytest

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.models.gguf_export import architecture_for
from tests.checkpoint.gguf.llama_cpp_files import make_model, write_model


@pytest.mark.parametrize(("name", "has_norm"), [("falcon-h1", False), ("falcon-h1_norm", True)])
def test_config_from_gguf_of_two_mixers_has_sizes_and_no_multipliers(name, has_norm, tmp_path):
    config = read_model_config(write_model(make_model(name), name, tmp_path / "model.gguf"))
    assert (config["mamba_d_ssm"], config["mamba_n_heads"], config["mamba_d_head"]) == (96, 6, 16)
    assert (config["mamba_rms_norm"], config["mamba_norm_before_gate"]) == (has_norm, False)
    assert not config["tie_word_embeddings"] and not [key for key in config if "multiplier" in key]


def test_equivalent_of_tied_embeddings_has_an_lm_head_with_its_own_multiplier():
    model = make_model("falcon-h1")
    name = "model.embed_tokens.weight"
    embedding = as_lazy(dict(model.named_parameters())[name])
    tensors, config = architecture_for(model.config).equivalent({name: embedding}, model.config)
    assert not config.tie_word_embeddings and tensors.keys() == {name, "lm_head.weight"}
    ratio = tensors[name].read() / tensors["lm_head.weight"].read()
    assert abs(ratio - 3.0 / 0.4).max() < 1e-5


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mamba_norm_before_gate": True}])
def test_metadata_of_parts_that_llama_cpp_does_not_compute_raises(changes):
    config = make_model("falcon-h1_norm", **changes).config
    with pytest.raises(ValueError, match=r"cannot express biases of attention .* or a norm before the gate"):
        architecture_for(config).metadata(config)
