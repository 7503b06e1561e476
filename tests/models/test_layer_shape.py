"""Sizes of layers with full attention, in the two spellings of config.json."""

from __future__ import annotations

import pytest

from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.layer_shape import LayerShape
from paddlenlp_ext.parallel.pipeline.stages import plan_stages
from paddlenlp_ext.parallel.tensor_parallel import check_sizes
from paddlenlp_ext.peft.methods.p_tuning import PTuningConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.trainer.optimizers.adamw_mini import head_dim_of
from tests.models.tiny_model import TINY, make_model

GEMMA_4 = {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
SIZES = {"global_head_dim": 12, "num_global_key_value_heads": 1}
STORED = {"01": {"head_dim": 12, "num_key_value_heads": 1}}
SLIDING = LayerShape(8, 8, 2, TINY["intermediate_size"])


def shapes_of(**changes) -> tuple[LayerShape, ...]:
    return DecoderConfig.from_dict({**TINY, **GEMMA_4, **changes}).layer_shapes


@pytest.mark.parametrize("spelling", [SIZES, {"per_layer_config": STORED}, {**SIZES, "per_layer_config": STORED}])
def test_layer_shapes_of_both_spellings_are_equal(spelling):
    full = LayerShape(12, 12, 1, TINY["intermediate_size"], has_v_proj=False)
    assert shapes_of(attention_k_eq_v=True, **spelling) == (SLIDING, full)


def test_layer_shapes_with_value_projections_have_the_common_number_of_heads():
    """Without `attention_k_eq_v`, transformers ignores `num_global_key_value_heads`."""
    assert shapes_of(**SIZES) == (SLIDING, LayerShape(12, 12, 2, TINY["intermediate_size"]))


def test_layer_shapes_of_other_families_are_the_sizes_of_the_model():
    config = DecoderConfig.from_dict({**TINY, "num_hidden_layers": 3})
    assert config.layer_shapes == (LayerShape(8, 8, 2, TINY["intermediate_size"]),) * 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 8, "sliding_window": 3}, "layer 1 .* only head_dim"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads"),
    ],
)
def test_layer_shapes_with_other_keys_or_uneven_heads_raise(sizes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of(per_layer_config={"1": sizes})


def test_mixer_weights_and_active_size_are_means_over_the_layers():
    """The mixer weights are all matrices of attention; the active size includes the chosen experts."""
    experts = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}
    model = make_model(**GEMMA_4, **SIZES, **experts, attention_k_eq_v=True)
    matrices = [p for name, p in model.named_parameters() if ".self_attn." in name and len(p.shape) == 2]
    assert model.config.mixer_weights == sum(p.size for p in matrices) / 2
    assert model.config.active_size == TINY["intermediate_size"] + 2 * 12


def test_heads_of_adamw_mini_are_the_heads_of_the_layer():
    config = DecoderConfig.from_dict({**TINY, **GEMMA_4, **SIZES})
    names = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight")
    assert [head_dim_of(name, config) for name in names] == [8, 12, 8]


def test_prefix_tuning_of_layers_with_different_heads_raises():
    with pytest.raises(ValueError, match="prefix_tuning: the layers of this model have keys and values of different"):
        get_peft_model(make_model(**GEMMA_4, **SIZES), PrefixTuningConfig(num_virtual_tokens=3))


def test_tensor_parallel_checks_the_heads_of_every_layer_and_refuses_experts_beside_the_feed_forward():
    config = DecoderConfig.from_dict({**TINY, **GEMMA_4, **SIZES, "attention_k_eq_v": True})
    with pytest.raises(ValueError, match=r"degree 2 does not divide num_key_value_heads 1 .* is 1$"):
        check_sizes(config, 2)
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}
    with pytest.raises(ValueError, match="tensor_parallel_degree 2 is not supported for models with experts beside"):
        check_sizes(DecoderConfig.from_dict({**TINY, **GEMMA_4, **experts}), 2)


SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "num_kv_shared_layers": 3,
}


def test_layer_shapes_with_shared_keys_name_the_last_earlier_layer_with_the_same_window():
    assert [shape.source for shape in shapes_of(**SHARED)] == [None, None, None, 2, 1, 1]
    assert [shape.projected_size for shape in shapes_of(**SHARED, **SIZES)] == [32, 48, 32, 0, 0, 0]
    assert [shape.key_size + shape.value_size for shape in shapes_of(**SHARED)][3:] == [0, 0, 0]


@pytest.mark.parametrize("is_wide", [False, True])
def test_layer_shapes_with_double_wide_mlp_widen_only_the_layers_with_shared_keys(is_wide):
    inner = TINY["intermediate_size"]
    wide = 2 * inner if is_wide else inner
    shapes = shapes_of(**SHARED, use_double_wide_mlp=is_wide)
    assert [shape.intermediate_size for shape in shapes] == [inner] * 3 + [wide] * 3


def test_mixer_weights_with_shared_keys_are_the_mean_over_the_layers():
    model = make_model(**GEMMA_4 | SIZES | SHARED, attention_k_eq_v=True)
    matrices = [p for name, p in model.named_parameters() if ".self_attn." in name and len(p.shape) == 2]
    assert model.config.mixer_weights == pytest.approx(sum(p.size for p in matrices) / 6)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (SHARED, "shared keys and values"),
        ({"hidden_size_per_layer_input": 4}, "layer embeddings"),
        ({**SHARED, "hidden_size_per_layer_input": 4}, "layer embeddings and shared keys and values"),
    ],
)
def test_parallelism_of_layers_that_exchange_tensors_is_refused_by_name(changes, names):
    config = DecoderConfig.from_dict({**TINY, **GEMMA_4, **changes})
    with pytest.raises(ValueError, match=f"tensor_parallel_degree 2 is not supported for models with {names};"):
        check_sizes(config, 2)
    with pytest.raises(ValueError, match=f"pipeline_parallel_degree 2 is not supported for models with {names}, be"):
        plan_stages(config, 2)
    check_sizes(config, 1)


@pytest.mark.parametrize("method", [PromptTuningConfig(), PTuningConfig()], ids=["prompt_tuning", "p_tuning"])
def test_prompt_tuning_of_layer_embeddings_raises(method):
    model = make_model(**GEMMA_4 | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": TINY["vocab_size"]})
    with pytest.raises(ValueError, match=r"layers of this model read embeddings of token ids.*; use LoRA"):
        get_peft_model(model, method)
