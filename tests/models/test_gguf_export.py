"""Models that a GGUF file cannot express, and files that are read back with other values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.models import gguf_export
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.checkpoint.gguf.llama_cpp_files import make_model, write_model
from tests.common.models import TINY_SIZES

GEMMA_4 = {
    "model_type": "gemma4_text",
    "global_head_dim": 16,
    "head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_dense_layers": 1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = make_model("llama")
    path = write_model(model, "llama", tmp_path_factory.mktemp("gguf") / "model.gguf")
    tensors = {name: as_lazy(tensor) for name, tensor in model.config.to_files(dict(model.named_parameters())).items()}
    return model, load_tokenizer(path), tensors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "olmo3"}, "model_type 'olmo3' cannot be written as GGUF; supported: .*llama"),
        (
            {"model_type": "gemma2", "query_pre_attn_scalar": 100, "head_dim": 8},
            r"GGUF file of gemma2 cannot express attention_scale 0\.1: readers of the file would get 0\.35",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [0, 1]},
            r"cannot express rotates \(False, True\): readers of the file would get \(True, True\)",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
            "a GGUF file of qwen2 cannot express the sliding window 4",
        ),
        (
            {"model_type": "lfm2", "full_attn_idxs": [1], "conv_bias": True},
            r"GGUF file of lfm2 cannot express mixers \(ConvolutionShape",
        ),
        (
            {"model_type": "lfm2_moe", **EXPERTS, "norm_topk_prob": False},
            "GGUF file of lfm2_moe cannot express experts .*normalizes=False",
        ),
        (
            {"model_type": "lfm2_moe", **EXPERTS, "routed_scaling_factor": 2.0},
            r"GGUF file of lfm2_moe cannot express experts .*scale=2\.0",
        ),
        (
            {"model_type": "afmoe", **EXPERTS, "num_shared_experts": 1},
            r"GGUF file of afmoe cannot express embedding_multiplier 1\.0: readers of the file would get",
        ),
        (
            {"model_type": "afmoe", **EXPERTS, "mup_enabled": True, "global_attn_every_n_layers": 1},
            r"GGUF file of afmoe cannot express windows \(None, None\)",
        ),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["full_attention", "linear_attention"]},
            r"GGUF file of qwen3_5_text cannot express mixers \(None, GatedDeltaShape",
        ),
        (
            {"model_type": "qwen3_5_text", "linear_value_head_dim": 16},
            "a GGUF file cannot express heads with 128 key channels and 16 value channels",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*", "time_step_min": 0.2},
            r"cannot express biases .* limits of the step size .* other than \[0\.001, inf\]",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "*-"},
            "a GGUF file of nemotron_h cannot express a model without Mamba-2 layers",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-"},
            r"GGUF files of nemotron_h_moe have no name for model\.layers\.3\.mlp\.up_proj\.weight",
        ),
        (
            {**GEMMA_4, "attention_bias": True, "num_hidden_layers": 4},
            "GGUF file of gemma4_text cannot express qkv_bias True",
        ),
        (
            {**GEMMA_4, "num_hidden_layers": 4, "num_kv_shared_layers": 1, "tie_word_embeddings": True},
            r"layers that read the keys and values of layer 1 .*: llama\.cpp reads layer 2",
        ),
        ({"model_type": "apertus", "mlp_bias": True}, "GGUF file of apertus cannot express mlp_bias True"),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' in config.json cannot be written as GGUF",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 2.0}},
            "cannot express the rope settings of layer 0",
        ),
    ],
)
def test_export_gguf_of_a_model_that_files_cannot_express_raises(settings, message, llama, tmp_path):
    model = AutoModelForCausalLM.from_config({**TINY_SIZES, "vocab_size": 96, **settings})
    tensors = {name: as_lazy(tensor) for name, tensor in model.config.to_files(dict(model.named_parameters())).items()}
    with pytest.raises(ValueError, match=message):
        gguf_export.export_gguf(tmp_path / "a.gguf", model.config, tensors, llama[1], [3], "f16", "tiny")
    assert not list(tmp_path.iterdir())


def test_export_gguf_of_the_unified_model_is_read_as_the_text_model(llama, tmp_path):
    settings = {**TINY_SIZES, **GEMMA_4, "num_hidden_layers": 4, "vocab_size": 96, "tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config({**settings, "model_type": "gemma4_unified_text"})
    tensors = {name: as_lazy(tensor) for name, tensor in model.config.to_files(dict(model.named_parameters())).items()}
    gguf_export.export_gguf(tmp_path / "a.gguf", model.config, tensors, llama[1], [3], "f32", "tiny")
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "a.gguf"))
    assert loaded.config.model_type == "gemma4_text"
    for name, parameter in loaded.named_parameters():
        np.testing.assert_array_equal(parameter.numpy(), dict(model.named_parameters())[name].numpy(), name)


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"])
def test_check_weights_finds_rows_in_another_order(outtype, llama, tmp_path):
    model, tokenizer, tensors = llama
    path = tmp_path / "a.gguf"
    gguf_export.export_gguf(path, model.config, tensors, tokenizer, [3], outtype, "tiny")
    layout = ARCHITECTURES.get("llama")
    gguf_export.check_weights(path, tensors, outtype, layout)
    name = "model.layers.1.self_attn.q_proj.weight"
    moved = np.roll(tensors[name].read(), 1, axis=0)
    changed = {**tensors, name: LazyTensor(moved.shape, "float32", lambda: moved)}
    with pytest.raises(ValueError, match=f"{name} has different values in the file"):
        gguf_export.check_weights(path, changed, outtype, layout)


def test_export_gguf_under_the_name_of_a_part_raises(llama):
    model, tokenizer, tensors = llama
    with pytest.raises(ValueError, match="reserved for a shard of a split model"):
        gguf_export.export_gguf(Path("a-00001-of-00002.gguf"), model.config, tensors, tokenizer, [3], "f16", "tiny")
