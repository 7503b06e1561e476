"""Layer embeddings, and layers that read the keys and values of other layers: formula, caches, files, parameters."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.composite_folder import TextModelWeights
from paddlenlp_ext.checkpoint.load_weights import load_weights
from paddlenlp_ext.generation.continuous_kv_cache import SlotCache
from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.models.layer_embeddings import layer_embeddings
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.parameter_count import describe_kinds
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears, quantized_layers
from paddlenlp_ext.trainer.optimizers.muon import is_muon_matrix
from tests.common.arrays import normal
from tests.common.golden import ArrayWeights
from tests.generation.tiny_models import tiny_model
from tests.models.tiny_model import TINY, make_model

FAMILY = "gemma4_e_shared_keys"
SIZES = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "head_dim": 12,
    "global_head_dim": 20,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": TINY["vocab_size"],
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
IDS = paddle.to_tensor(np.random.default_rng(0).integers(0, 96, (2, 9)))


def test_layer_embeddings_are_the_mean_of_token_and_context_parts():
    decoder = make_model(**SIZES).model
    for name, parameter in decoder.named_parameters():
        if "per_layer" in name and "layers." not in name:
            parameter.set_value(paddle.to_tensor(normal(len(name), *parameter.shape)))
    x_BSD = paddle.to_tensor(normal(1, 2, 9, 32))
    table, matrix, scale = (
        layer.weight.numpy().astype(np.float64)
        for layer in (
            decoder.embed_tokens_per_layer,
            decoder.per_layer_model_projection,
            decoder.per_layer_projection_norm,
        )
    )
    context = (x_BSD.numpy() @ matrix.T / np.sqrt(32)).reshape(2, 9, 4, 6)
    context *= scale / np.sqrt((context**2).mean(-1, keepdims=True) + 1e-6)
    expected = (table[IDS.numpy()].reshape(2, 9, 4, 6) * np.sqrt(6) + context) / np.sqrt(2)
    np.testing.assert_allclose(layer_embeddings(decoder, x_BSD, IDS).numpy(), expected, rtol=0, atol=2e-5)


def test_decoder_gives_each_layer_its_own_embedding():
    """Change the embeddings of one layer: the outputs of the layers before it keep their bits."""
    model = make_model(**SIZES)
    outputs: list[np.ndarray] = []
    for layer in model.model.layers:
        layer.register_forward_post_hook(lambda layer, inputs, output: outputs.append(output.numpy()))
    model(IDS)
    before, table = [*outputs], model.model.embed_tokens_per_layer.weight
    outputs.clear()
    values = table.numpy()
    values[:, 12:18] += 1
    table.set_value(values)
    model(IDS)
    assert [np.array_equal(*pair) for pair in zip(before, outputs, strict=True)] == [True, True, False, False]


@paddle.no_grad()
@pytest.mark.parametrize("kind", ["padded", "slots"])
def test_caches_store_no_keys_for_layers_that_read_those_of_other_layers(kind):
    model = tiny_model(FAMILY)
    if kind == "padded":
        cache = KVCache([0, 0])
        model(IDS, cache=cache)
        assert len(cache.tensors) == 2 * 3
        return
    slots = SlotCache()
    slots.add_row(), slots.add_row()
    model(IDS, cache=slots.rows(0, 2, [9, 9]))
    assert sorted(slots.layers) == [0, 1, 2]


def test_projections_in_files_that_no_layer_reads_are_not_loaded():
    model = make_model(**SIZES)
    tensors = {name: normal(index, *p.shape) for index, (name, p) in enumerate(model.named_parameters())}
    unused = {f"model.layers.3.self_attn.{name}.weight": np.zeros((3, 3), np.float32) for name in ("k_proj", "k_norm")}
    load_weights(model, model.config.from_files(ArrayWeights({**tensors, **unused})))
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.numpy(), tensors[name])
    with pytest.raises(ValueError, match=r"1 unexpected: model\.layers\.1\.self_attn\.k_norm\.bias"):
        other = {"model.layers.1.self_attn.k_norm.bias": np.zeros(3, np.float32)}
        load_weights(model, model.config.from_files(ArrayWeights({**tensors, **other})))


def test_text_model_names_in_composite_folders_include_the_layer_embeddings():
    names = [name for name, _ in make_model(**SIZES).named_parameters()]
    for prefix in ("model.", "model.language_model.", "language_model.model."):
        stored = {name.replace("model.", prefix, 1): np.zeros(1, np.float32) for name in names}
        assert TextModelWeights(ArrayWeights(stored)).names() == names


def test_lora_of_all_linear_layers_adapts_the_readers_of_layer_embeddings():
    model = get_peft_model(make_model(**SIZES), LoRAConfig(rank=2))
    adapted = {name.removeprefix("base_model.") for name, _ in adapter_layers(model)}
    assert "model.per_layer_model_projection" in adapted
    assert {"model.layers.3.per_layer_input_gate", "model.layers.3.per_layer_projection"} <= adapted
    assert "model.layers.1.self_attn.k_proj" in adapted and "model.layers.3.self_attn.k_proj" not in adapted
    assert "layer embeddings " in describe_kinds(model)


def test_quantization_leaves_the_table_of_layer_embeddings_in_full_precision():
    model = make_model(**SIZES)
    quantize_linears(model, QuantizationConfig(algo="weight_only_int8"))
    names = quantized_layers(model)
    assert "model.per_layer_model_projection" in names and "model.layers.0.per_layer_projection" in names
    assert model.model.embed_tokens_per_layer.weight.dtype == paddle.float32


def test_muon_leaves_the_table_of_layer_embeddings_to_adamw():
    assert not is_muon_matrix("model.embed_tokens_per_layer.weight", (96, 24))
    assert is_muon_matrix("model.per_layer_model_projection.weight", (24, 32))
