"""Test DecoderConfig: validation, windows, head sizes, tensor plans."""

from __future__ import annotations

import contextlib
import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import paddlenlp_ext
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.moe_config import router_overrides
from paddlenlp_ext.models.registry import FAMILIES
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.linear import Linear
from tests.golden.cases.model_cases import CASES
from tests.models.tiny_model import TINY, make_model

LAYER_KINDS = {
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 2, "linear_head_dim": 6},
    "falcon_h1": {"mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_d_state": 6},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_state": 6},
    "lfm2": {"full_attn_idxs": [1]},
    "lfm2_moe": {"full_attn_idxs": [1], "num_dense_layers": 1},
    "nemotron_h": {"mamba_num_heads": 4, "n_groups": 2, "ssm_state_size": 6, "moe_latent_size": 6},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_next": {"full_attention_interval": 2, "mlp_only_layers": [0]},
}
"""Keys of families whose default has not all kinds of layers."""
UNSUPPORTED = Path(paddlenlp_ext.__file__).parent / "models/unsupported_families.json"
GEMMA_4 = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
LATENT = {"model_type": "deepseek_v2", "num_key_value_heads": 4, "first_k_dense_replace": 2}


def test_unsupported_families_are_not_supported():
    assert not json.loads(UNSUPPORTED.read_text(encoding="utf-8")).keys() & set(FAMILIES.names())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' in config.json is not supported; supported: afmoe, .*llama, .*mistral",
        ),
        (
            {"model_type": "lfm3"},
            "'lfm3' .* not supported, because this package lacks short convolutions with windows and gates per head; "
            "the most similar supported family is 'lfm2'; supported: ",
        ),
        ({"model_type": "gemma3n_text"}, "lacks alternating updates.* most similar .* 'gemma3_text'"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*F"},
            r"each layer in config.json must be mamba \(M\), attention \(\*\), mlp \(-\) or moe \(E\), got F, full_att",
        ),
        (
            {"model_type": "nemotron_h", "mamba_num_heads": 4, "n_groups": 3},
            r"3 groups of Mamba-2 \(n_groups\) must divide the 4 heads",
        ),
        ({"model_type": "falcon_h1", "mamba_d_ssm": 30, "mamba_n_heads": 4}, "must have mamba_d_ssm = 30 channels"),
        ({"model_type": "falcon_h1", "ssm_multipliers": [1.0] * 4}, "ssm_multipliers .* must have 5 numbers, got 4"),
        ({"model_type": "falcon_h1", "projectors_bias": True}, "projectors_bias True in config.json is not supported"),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": "4"}},
            "full_attn_layers .* must be a list of layer numbers from 1 to 2, got '4'",
        ),
        ({"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [2, "x"]}}, r"got \[2, 'x'\]"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [99]}}, r"from 1 to 2, got \[99\]"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [0]}}, r"from 1 to 2, got \[0\]"),
        ({"model_type": "nemotron_h", "mlp_bias": True}, "mlp_bias True in config.json is not supported"),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "xielu"}, "mlp_hidden_act 'xielu' in config.json is not supp"),
        (
            {"model_type": "olmo_hybrid", "layer_types": ["linear_attention"] * 2},
            "layer_types in config.json must contain both linear_attention and full_attention",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "conv"]},
            "must be mamba or attention for each of the 2 layers, got 2 entries: conv, linear_attention",
        ),
        (
            {"model_type": "granitemoehybrid", "mamba_n_heads": 4, "mamba_d_head": 8},
            r"mamba_n_heads 4 heads with 8 channels must have mamba_expand \* hidden_size = 64 channels",
        ),
        (
            {"model_type": "granitemoehybrid", "mamba_n_heads": 4, "mamba_n_groups": 3},
            "mamba_n_groups 3 must divide the number of heads",
        ),
        (
            {"model_type": "granitemoehybrid", "mamba_n_heads": 4, "time_step_limit": [1.0, 0.5]},
            r"time_step_limit \[1.0, 0.5\] in config.json must contain the smallest and the largest step size",
        ),
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": "LLX"},
            "sliding_window_pattern 'LLX' in config.json must be a number of layers, or the letters L and G",
        ),
        (
            {"model_type": "granite_swa", "layer_rope_theta": [100.0]},
            "layer_rope_theta in config.json needs 2 entries, one per layer, not 1",
        ),
        (
            {"model_type": "hunyuan_v1_moe", "num_experts": [4, 8]},
            r"num_experts in config\.json must have the same value in all layers, got \[4, 8\]",
        ),
        ({"model_type": "arcee", "hidden_act": "silu"}, "hidden_act 'silu' .* known: relu2, xielu"),
        ({"model_type": "lfm2", "layer_types": ["conv", "mamba"]}, "must be full_attention or conv .* conv, mamba"),
        (
            {"model_type": "qwen3_5_text", "head_dim": 16, "layer_types": ["linear_attention", "mamba"]},
            "must be full_attention or linear_attention for each of the 2 layers, got 2 .*: linear_attention, mamba",
        ),
        (
            {"model_type": "qwen3_5_text", "head_dim": 16, "linear_num_key_heads": 3},
            "linear_num_value_heads 32 in config.json is not a multiple of linear_num_key_heads 3",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*silu"),
        ({"vocab_size": None}, "vocab_size in config.json must be a positive integer, got None"),
        ({"hidden_size": 32.0}, "hidden_size .* got 32.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* got 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 34}, "hidden_size 34 is not a multiple of num_attention_heads 4"),
        ({"rope_scaling": {"type": "su"}}, "unknown rope type 'su'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor .* not supported for model_type 'llama'"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop 0.1 in config.json is not supported for phi3"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 .* not supported"),
        (
            {"model_type": "gemma2", "final_logit_softcapping": -3},
            "final_logit_softcapping .* must be above 0.* got -3",
        ),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA_4, "num_kv_shared_layers": 1}, "num_kv_shared_layers 1 .*: layer 1 reads .*no layer before layer 1"),
        ({**GEMMA_4, "num_kv_shared_layers": 3}, "num_kv_shared_layers 3 .*: layer 0 reads .*no layer before layer 0"),
        (
            {**GEMMA_4, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 9},
            "vocab_size .*: tokens after 8 have no layer embeddings .*; do not add tokens to this model",
        ),
        ({**GEMMA_4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' .*: .*'vision'"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window .* got 0"),
        ({"model_type": "minicpm3"}, "num_key_value_heads 2 .*one key head per query head; set it to .* 4"),
        ({**LATENT, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc' .*supported: 'greedy', 'group_limited_greedy'"),
        (
            {**LATENT, "model_type": "deepseek_v3", "scoring_func": "softmax"},
            "scoring_func 'softmax' .*supported: 'sigmoid'",
        ),
        ({**LATENT, "norm_topk_prob": True}, "norm_topk_prob True in config.json is not supported"),
        ({**LATENT, "moe_layer_freq": 2}, "moe_layer_freq 2 .* supported: 1"),
        ({**LATENT, "model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "mlp_layer_types .* of the 2 layers"),
        ({**LATENT, "rope_scaling": {"type": "linear", "mscale_all_dim": 1}}, "mscale_all_dim .* needs 'factor'"),
        ({"model_type": "glm4_moe", "n_group": 3}, "divides 128 experts into 3 groups, and chooses 1"),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias .* set it to false"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "a token uses 9 experts, but a layer has only 8"),
        ({"model_type": "minimax_m2", "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"model_type": "minimax_m2", "scoring_func": "softmax"}, "scoring_func 'softmax' .*supported: 'sigmoid'"),
        ({"model_type": "minimax_m2", "rotary_dim": "8"}, "rotary_dim"),
        ({"model_type": "minimax_m2", "rotary_dim": 0}, "partial_rotary_factor"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise .* set it to 0"),
    ],
)
def test_from_dict_unsupported_value_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_dict({**TINY, **changes})


@pytest.mark.parametrize(("further", "unread"), [(0, (2,)), (2, (2, 3))])
def test_files_of_deepseek_may_have_layers_that_predict_further_tokens(further, unread):
    changes = {**LATENT, "model_type": "deepseek_v3", "num_nextn_predict_layers": further}
    layout = DecoderConfig.from_dict({**TINY, **changes}).file_layout
    found = [layer for layer in range(30) if layout.unused.fullmatch(f"model.layers.{layer}.eh_proj.weight")]
    assert found == list(unread)


def test_from_dict_of_deepseek_v2_without_experts_may_have_null_experts_per_token():
    """Check what transformers writes for a model with dense layers only."""
    config = DecoderConfig.from_dict({**TINY, **LATENT, "num_experts_per_tok": None})
    assert config.experts == (None, None)


@pytest.mark.parametrize("case", sorted(CASES))
def test_from_dict_without_a_key_reads_the_default_or_raises(case):
    config = CASES[case]
    for key in config:
        rest = {name: value for name, value in config.items() if name != key}
        for source in (rest, {**rest, key: None}):
            with contextlib.suppress(ValueError):
                DecoderConfig.from_dict(source)


def test_from_dict_without_model_type_lists_known_families():
    with pytest.raises(ValueError, match=r"no 'model_type'; set it to one of: .*llama"):
        DecoderConfig.from_dict({"vocab_size": 3})


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None, None)),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
        ({"model_type": "cohere2", "sliding_window": 8, "sliding_window_pattern": 2}, (8, None)),
        ({"model_type": "gemma2", "sliding_window": 8}, (8, None)),
        ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}, (8, None)),
        ({**GEMMA_4, "num_hidden_layers": 7}, (512, 512, 512, 512, 512, None, None)),
        ({**GEMMA_4, "model_type": "gemma4_unified_text"}, (1024, None)),
        ({"model_type": "olmo3", "num_hidden_layers": 4}, (4096, 4096, 4096, None)),
        ({"model_type": "exaone4", "num_hidden_layers": 5}, (4096, 4096, 4096, None, 4096)),
        ({"model_type": "exaone4", "num_hidden_layers": 3, "sliding_window_pattern": "LG"}, (4096, None, 4096)),
        ({"model_type": "exaone4", "sliding_window": None}, (None, None)),
        ({"model_type": "granite_swa", "num_hidden_layers": 5}, (None, 128, 128, 128, None)),
        ({"model_type": "afmoe", "global_attn_every_n_layers": 2}, (1024, None)),
        ({"model_type": "mellum"}, (None, None)),
        ({"model_type": "cohere2", "sliding_window": 8, "layer_types": ["full_attention"] * 2}, (None, None)),
        (
            {
                "model_type": "smollm3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "no_rope_layers": [0, 1, 0],
            },
            (8, None),
        ),
    ],
)
def test_from_dict_sliding_windows_follow_the_family(config, windows):
    assert DecoderConfig.from_dict({**TINY, **config}).windows == windows


@pytest.mark.parametrize(
    ("config", "caps"),
    [
        ({"model_type": "gemma2"}, (50.0, 30.0)),
        ({"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None}, (None, None)),
        ({"model_type": "gemma3_text"}, (None, None)),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 20}, (None, 20.0)),
        ({**GEMMA_4, "final_logit_softcapping": 30}, (None, 30.0)),
    ],
)
def test_from_dict_soft_caps_follow_the_family(config, caps):
    read = DecoderConfig.from_dict({**TINY, **config})
    assert (read.attention_softcap, read.logit_softcap) == caps


@pytest.mark.parametrize(
    ("config", "rotates"),
    [
        ({"model_type": "smollm3", "num_hidden_layers": 5}, (True, True, True, False, True)),
        ({"model_type": "smollm3", "no_rope_layer_interval": 2}, (True, False)),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1, 0]}, (False, True)),
        ({"model_type": "exaone4", "sliding_window_pattern": 2}, (True, False)),
        ({"model_type": "exaone4", "sliding_window": None}, None),
        ({"model_type": "granite_swa", "layer_rope_theta": [0, 500.0]}, (False, True)),
        ({"model_type": "afmoe", "global_attn_every_n_layers": 2}, (True, False)),
        ({"model_type": "cohere2", "layer_types": ["full_attention", "sliding_attention"]}, (False, True)),
    ],
)
def test_from_dict_layers_without_rotation_follow_the_family(config, rotates):
    assert DecoderConfig.from_dict({**TINY, **config}).rotates == rotates


def test_from_dict_phi3_reads_former_names_of_longrope():
    scaling = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    configs = [{**TINY, "model_type": "phi3", "rope_scaling": {"type": kind, **scaling}} for kind in ("su", "yarn")]
    ropes = [DecoderConfig.from_dict(config).ropes for config in configs]
    assert ropes[0] == ropes[1] and ropes[0][0].rope_type == "longrope"
    assert ropes[0][0].number("original_max_position_embeddings") == 4096
    yarn = {**TINY, "model_type": "phi3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert DecoderConfig.from_dict(yarn).ropes[0].rope_type == "yarn"


@pytest.mark.parametrize(
    ("config", "sparse"),
    [
        ({"model_type": "mixtral"}, (True, True, True, True)),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [2]}, (True, True, False, True)),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
        ({"model_type": "ernie4_5_moe"}, (False, True, True, True)),
        ({"model_type": "glm4_moe", "first_k_dense_replace": 2}, (False, False, True, True)),
        (
            {"model_type": "ernie4_5_moe", "moe_layer_end_index": 2, "moe_layer_interval": 2},
            (False, True, False, False),
        ),
    ],
)
def test_from_dict_layers_with_experts_follow_the_family(config, sparse):
    experts = DecoderConfig.from_dict({**TINY, "num_hidden_layers": 4, **config}).experts
    assert tuple(shape is not None for shape in experts) == sparse


def test_router_overrides_switch_the_loss_on_and_off():
    config = {**TINY, "model_type": "mixtral", "output_router_logits": True}
    for coefficient, expected in ((None, 0.001), (0.5, 0.5), (0.0, 0.0)):
        changed = {**config, **router_overrides(config, coefficient)}
        assert DecoderConfig.from_dict(changed).router_loss == expected
    with pytest.raises(ValueError, match="router_aux_loss_coef: models of model_type 'llama' have no auxiliary loss"):
        router_overrides(TINY, 0.1)


def test_from_dict_qwen3_moe_reads_both_names_of_the_number_of_experts():
    for name in ("num_experts", "num_local_experts"):
        shapes = DecoderConfig.from_dict({**TINY, "model_type": "qwen3_moe", name: 9}).experts
        assert {shape.num_experts for shape in shapes} == {9}


def test_from_dict_router_loss_needs_output_router_logits():
    config = {**TINY, "model_type": "mixtral", "router_aux_loss_coef": 0.5}
    assert DecoderConfig.from_dict(config).router_loss == 0.0
    assert DecoderConfig.from_dict({**config, "output_router_logits": True}).router_loss == 0.5


def test_from_dict_smollm3_with_too_few_no_rope_layers_raises():
    with pytest.raises(ValueError, match=r"no_rope_layers in config\.json needs 2 entries, one per layer, not 1"):
        DecoderConfig.from_dict({**TINY, "model_type": "smollm3", "no_rope_layers": [1]})


def test_from_dict_invalid_layer_types_raise():
    sliding = {**TINY, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    for types in (["full_attention"], ["full_attention", "chunked_attention"]):
        with pytest.raises(ValueError, match=r"layer_types in config\.json"):
            DecoderConfig.from_dict({**sliding, "layer_types": types})


def test_from_dict_head_dim_may_differ_from_hidden_size():
    config = DecoderConfig.from_dict({**TINY, "hidden_size": 34, "head_dim": 6})
    assert config.head_dim == 6 and config.ropes[0].rotary_dim == 6
    assert DecoderConfig.from_dict({**TINY, "model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(("keys", "head_dim"), [({}, 128), ({"head_dim": 16}, 16), ({"head_dim": None}, 8)])
def test_from_dict_minimax_m2_rotates_rotary_dim_channels_of_a_head(keys, head_dim):
    config = DecoderConfig.from_dict({**TINY, "model_type": "minimax_m2", "rotary_dim": 4, **keys})
    assert (config.head_dim, config.ropes[0].rotary_dim) == (head_dim, 4)


@pytest.mark.parametrize("model_type", FAMILIES.names())
@pytest.mark.parametrize("tied", [True, False])
def test_tensor_plan_covers_exactly_all_matrices(model_type, tied):
    changes = {**LATENT, **LAYER_KINDS.get(model_type, {}), "model_type": model_type}
    model = make_model(**changes, head_dim=8, tie_word_embeddings=tied)
    layers = dict(model.named_sublayers())
    plan = dict(model.config.tensor_plan)
    if tied:
        plan.pop("lm_head")
    for name, layer in layers.items():
        if isinstance(layer, (Linear, Embedding)):
            assert sum(fnmatchcase(name, pattern) for pattern in plan) == 1, name
    for pattern in plan:
        assert any(fnmatchcase(name, pattern) for name in layers), pattern


def test_published_keys_of_kimi_linear_give_the_config_of_the_common_keys():
    case = CASES["kimi_linear"]
    kept = ("linear_num_heads", "linear_head_dim", "layer_types", "mlp_layer_types", "num_local_experts", "n_group")
    published = {key: value for key, value in case.items() if key not in (*kept, "num_experts_per_tok")}
    published |= {
        "linear_attn_config": {"head_dim": 10, "num_heads": 3, "full_attn_layers": [2], "kda_layers": [1, 3]},
        "first_k_dense_replace": 1,
        "num_experts": case["num_local_experts"],
        "num_experts_per_token": case["num_experts_per_tok"],
        "num_expert_group": case["n_group"],
        "moe_renormalize": True,
    }
    found, expected = (DecoderConfig.from_dict(config) for config in (published, case))
    assert (found.mixers, found.experts, found.latent) == (expected.mixers, expected.experts, expected.latent)
