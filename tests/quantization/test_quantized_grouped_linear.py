"""Quantized layers of experts: values, files, and the parts of a model that know of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.file_layouts.base import matrix_name
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import as_lazy, save_sharded
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.quantized_weight import TENSORS
from paddlenlp_ext.paddle_compat import own_buffers
from paddlenlp_ext.quantization.checkpoint_tensors import tensors_to_store
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import (
    dequantize_linears,
    packed_size,
    quantization_report,
    quantize_linears,
    quantized_layers,
)
from paddlenlp_ext.quantization.quantize_weight import quantize
from paddlenlp_ext.quantization.quantized_grouped_linear import QuantizedGroupedLinear
from tests.common.adapters import INPUT_IDS, logits_of, same_bits, state_of, tiny_model
from tests.common.models import TINY_SIZES

FORMATS = [
    QuantizationConfig(algo="nf4"),
    QuantizationConfig(algo="nf4", block_size=34, double_quant=True, double_quant_block_size=10),
    QuantizationConfig(algo="fp4", double_quant=True),
    QuantizationConfig(algo="nf4_symmetric"),
    QuantizationConfig(algo="weight_only_int8"),
    QuantizationConfig(algo="weight_only_int4"),
    QuantizationConfig(algo="weight_only_int4", group_size=12),
    QuantizationConfig(algo={"down_proj": "weight_only_int8", ".*": "nf4"}),
]
by_format = pytest.mark.parametrize("options", FORMATS, ids=lambda options: options.describe())
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
MIXTRAL: dict[str, Any] = {
    **TINY_SIZES,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
GPT_OSS: dict[str, Any] = {
    **TINY_SIZES,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


def quantized_model(options: QuantizationConfig) -> CausalLM:
    model = tiny_model("experts")
    quantize_linears(model, options)
    return model


@by_format
def test_quantize_linears_quantizes_each_part_of_an_expert_on_its_own(options: QuantizationConfig):
    layers, plain = quantized_layers(quantized_model(options)), tiny_model("experts").state_dict()
    for name, parts in ((GATE_UP, 2), (DOWN, 1)):
        layer, chosen = layers[name], options.for_layer(name)
        assert isinstance(layer, QuantizedGroupedLinear) and chosen is not None
        weight = plain[f"{name}.weight"].numpy()
        assert layer.weight_shape == weight.shape
        for expert in range(5):
            for part, values in enumerate(np.split(weight[expert], parts)):
                stored, alone = layer.stored.matrix(expert, part), quantize(values, chosen)
                for tensor in TENSORS:
                    found, expected = getattr(stored, tensor), getattr(alone, tensor)
                    assert (found is None) == (expected is None)
                    assert found is None or np.array_equal(found.numpy(), expected.numpy()), (tensor, expert, part)


@by_format
def test_dequantize_linears_of_experts_keeps_logits(options: QuantizationConfig):
    model = quantized_model(options)
    expected = logits_of(model)
    dequantize_linears(model)
    assert not quantized_layers(model)
    assert sum(isinstance(layer, GroupedLinear) for layer in model.sublayers()) == 4
    np.testing.assert_allclose(logits_of(model), expected, rtol=0, atol=1e-5)


@by_format
def test_packed_size_counts_experts_as_stored(options: QuantizationConfig):
    layers = quantized_layers(quantized_model(options)).values()
    size = packed_size(tiny_model("experts"), options)
    assert size.num_bytes == sum(layer.num_bytes for layer in layers)
    assert size.num_weights == sum(layer.num_weights for layer in layers) > 2 * 5 * 3 * 36 * 36


@by_format
def test_quantized_experts_come_back_from_files_to_the_bit(options: QuantizationConfig, tmp_path: Path):
    tiny_model("experts").save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=options)
    assert same_bits(state_of(model), state_of(quantized_model(options)))
    model.save_pretrained(tmp_path / "packed")
    assert same_bits(state_of(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), state_of(model))
    names = open_weights(tmp_path / "packed").names()
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in names and not any("gate_up" in name for name in names)


def test_quantized_experts_with_biases_come_back_from_stacked_files(tmp_path: Path):
    model = AutoModelForCausalLM.from_config(GPT_OSS, seed=0)
    model.save_pretrained(tmp_path / "plain")
    options = QuantizationConfig(algo="nf4", double_quant=True)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=options)
    quantize_linears(model, options)
    assert same_bits(state_of(packed), state_of(model))
    packed.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert same_bits(state_of(again), state_of(model))
    assert f"{GATE_UP}.2.1.weight.absmax" in open_weights(tmp_path / "packed").names()
    np.testing.assert_array_equal(logits_of(again), logits_of(packed))


def test_load_quantized_experts_with_gate_and_up_in_one_matrix_raises(tmp_path: Path):
    model = AutoModelForCausalLM.from_config(GPT_OSS, seed=0)
    weights, options = model.state_dict()[f"{GATE_UP}.weight"], QuantizationConfig(algo="nf4")
    quantize_linears(model, options)
    model.save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    tensors = {name: source.read(name) for name in source.names() if not name.startswith(f"{GATE_UP}.")}
    for expert, weight in enumerate(weights):
        tensors |= tensors_to_store(matrix_name(GATE_UP, expert, 0), quantize(weight, options), "float32")
    save_sharded(tmp_path, {name: as_lazy(tensor).read() for name, tensor in tensors.items()})
    with pytest.raises(
        ValueError, match=r"the experts of model\.layers\.1\..* do not have the expected number of quantized"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_load_folder_of_transformers_4_with_quantized_experts_and_router(tmp_path: Path):
    """Read 4-bit files of Mixtral, in which bitsandbytes quantized all linear layers: experts and routers too."""
    model, options = AutoModelForCausalLM.from_config(MIXTRAL, seed=0), QuantizationConfig(algo="nf4")
    router = quantize(model.state_dict()["model.layers.1.mlp.gate.weight"], options)
    quantize_linears(model, options)
    model.save_pretrained(tmp_path)
    source, name = open_weights(tmp_path), "model.layers.1.block_sparse_moe.gate"
    tensors = {each: source.read(each) for each in source.names() if each != f"{name}.weight"}
    tensors |= tensors_to_store(name, router, "float32")
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight.absmax" in tensors
    save_sharded(tmp_path, {name: as_lazy(tensor).read() for name, tensor in tensors.items()})
    config = json.loads((tmp_path / "config.json").read_text())
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    expected = {**state_of(model), "model.layers.1.mlp.gate.weight": dequantize(router).numpy()}
    assert same_bits(state_of(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_packed_documents_over_quantized_experts_equal_single_documents():
    model, ids = quantized_model(FORMATS[1]), paddle.to_tensor(INPUT_IDS[:1])
    with paddle.no_grad():
        packed = model(ids, document_lengths=[[3, 8]])[0].numpy()
        parts = [model(ids[:, :3])[0].numpy(), model(ids[:, 3:])[0].numpy()]
    np.testing.assert_allclose(packed, np.concatenate(parts), rtol=0, atol=1e-5)


def test_config_json_of_quantized_experts_names_this_project(tmp_path: Path):
    """Expect it of nf4 too: bitsandbytes reads linear layers, and transformers 5 has none of experts."""
    for algo, method in (("nf4", "paddlenlp_ext"), ({".*experts.*": None, ".*": "nf4"}, "bitsandbytes")):
        quantized_model(QuantizationConfig(algo=algo)).save_pretrained(tmp_path)
        fields = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        assert fields["quant_method"] == method


def rewritten(folder: Path, change: Any) -> Path:
    """Save a quantized model whose stored tensors `change` maps to others."""
    quantized_model(FORMATS[0]).save_pretrained(folder)
    source = open_weights(folder)
    save_sharded(folder, change({name: source.read(name) for name in source.names()}))
    return folder


EXPERT = "model.layers.1.mlp.experts.{}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {k: v for k, v in tensors.items() if EXPERT.format("3.up_proj") not in k},
            r"experts\.gate_up_proj\.weight needs 5 x 2 stored tensors, but 1 are missing: expert 3, projection 1",
        ),
        (
            lambda tensors: {k: v for k, v in tensors.items() if EXPERT.format("3.up_proj.weight.") not in k},
            r"some experts of model\.layers\.1\.mlp\.experts\.gate_up_proj\.weight are quantized, and others are not",
        ),
        (
            lambda tensors: {
                k: tensors[k.replace(EXPERT.format("3.up_proj"), "model.layers.1.self_attn.k_proj")] for k in tensors
            },
            r"experts of model\.layers\.1\.mlp\.experts\.gate_up_proj do not have the expected number of quantized",
        ),
    ],
    ids=["missing", "mixed", "another shape"],
)
def test_load_damaged_quantized_experts_raises(change: Any, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(rewritten(tmp_path, change))


def test_group_size_that_does_not_divide_the_inputs_of_experts_raises_with_their_name():
    options = QuantizationConfig(algo={"experts.down_proj": "weight_only_int4"}, group_size=10)
    with pytest.raises(ValueError, match=r"experts\.down_proj: group_size=10 does not divide the 36 inputs"):
        quantized_model(options)


def test_quantization_report_counts_weights_of_experts():
    weights = 5 * 36 * 36
    report = quantization_report(quantized_model(QuantizationConfig(algo="nf4")))
    assert report.endswith(f"nf4, blocks of 64; {2 * 3 * weights:,} of them in experts")
    report = quantization_report(quantized_model(QuantizationConfig(algo={"experts.gate_up_proj": "nf4"})))
    assert f"; {2 * 2 * weights:,} of them in experts; not quantized: {2 * weights:,} weights of experts" in report


def test_kernel_caches_of_replaced_codes_are_dropped():
    """Replace the codes as expert parallelism does, so that indices stand for other experts."""
    layer = quantized_layers(quantized_model(FORMATS[0]))[DOWN]
    assert isinstance(layer, QuantizedGroupedLinear)
    layer.stored.matrix(0, 0).kernel_cache["levels"] = "of expert 0"
    assert layer.stored.matrix(0, 0).kernel_cache
    own_buffers(layer)["codes"] = layer.codes[3:].clone()
    assert layer.weight_shape == (2, 36, 36) and not layer.stored.matrix(0, 0).kernel_cache
