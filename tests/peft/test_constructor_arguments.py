"""Constructor arguments of the adapter configs by the names of PEFT and PaddleNLP."""

from __future__ import annotations

import inspect

import pytest

from paddlenlp_ext.peft.constructor_arguments import PromptTuningInit, TaskType, argument_names
from paddlenlp_ext.peft.methods.adalora import AdaLoRAConfig
from paddlenlp_ext.peft.methods.boft import BOFTConfig
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.loha import LoHaConfig
from paddlenlp_ext.peft.methods.lokr import LoKrConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.miss import MiSSConfig
from paddlenlp_ext.peft.methods.mora import MoRAConfig
from paddlenlp_ext.peft.methods.oft import OFTConfig
from paddlenlp_ext.peft.methods.olora import OLoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.methods.vera import VeRAConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            LoRAConfig(r=4, lora_alpha=32, lora_dropout=0.1, use_rslora=True),
            LoRAConfig(rank=4, alpha=32, dropout=0.1, rslora=True),
        ),
        (LoRAConfig(lora_rank=4, rslora=True, lora_plus_scale=2.0), LoRAConfig(rank=4, rslora=True, plus_scale=2.0)),
        (VeRAConfig(r=4, vera_dropout=0.1, d_initial=0.2), VeRAConfig(rank=4, dropout=0.1, d_initial=0.2)),
        (LoKrConfig(lora_dim=4, decompose_factor=2), LoKrConfig(rank=4, factor=2)),
        (
            AdaLoRAConfig(init_r=6, target_r=4, deltaT=3, lora_alpha=32),
            AdaLoRAConfig(init_r=6, target_r=4, delta_t=3, alpha=32),
        ),
        (
            MiSSConfig(r=4, mini_r=2, init_weights="mini", miss_dropout=0.1),
            MiSSConfig(rank=4, mini_rank=2, variant="mini", dropout=0.1),
        ),
        (
            BOFTConfig(boft_block_size=0, boft_block_num=4, boft_n_butterfly_factor=2, boft_dropout=0.1),
            BOFTConfig(num_blocks=4, butterfly_factors=2, dropout=0.1),
        ),
        (MiSSConfig(init_weights=True), MiSSConfig(variant="balance")),
        (OFTConfig(oft_block_size=4, num_cayley_neumann_terms=5), OFTConfig(block_size=4, neumann_terms=5)),
        (
            PrefixTuningConfig(num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=8),
            PrefixTuningConfig(num_tokens=4, projection=True, projection_hidden_size=8),
        ),
        (PrefixTuningConfig(num_prefix_tokens=4, prefix_dropout=0.1), PrefixTuningConfig(num_tokens=4, dropout=0.1)),
        (
            PromptTuningConfig(
                num_virtual_tokens=4, prompt_tuning_init=PromptTuningInit.TEXT, prompt_tuning_init_text="red"
            ),
            PromptTuningConfig(num_tokens=4, init="text", init_text="red"),
        ),
    ],
    ids=lambda config: type(config).__name__,
)
def test_config_accepts_names_of_peft_and_paddlenlp(given, expected):
    assert type(given) is type(expected) and given == expected


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        ({"use_dora": True}, DoRAConfig),
        ({"use_dora": False, "pissa": False}, LoRAConfig),
        ({"pissa": True}, PiSSAConfig),
        ({"init_lora_weights": "pissa"}, PiSSAConfig),
        ({"init_lora_weights": "olora"}, OLoRAConfig),
        ({"init_lora_weights": True}, LoRAConfig),
        ({"init_lora_weights": "gaussian"}, LoRAConfig),
        ({"use_mora": True}, MoRAConfig),
    ],
)
def test_lora_config_variant_argument_returns_the_variants_config(arguments: dict, method: type):
    config = LoRAConfig(r=4, **arguments)
    assert type(config) is method
    assert config.rank == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"task_type": "CAUSAL_LM"},
        {"task_type": TaskType.CAUSAL_LM, "inference_mode": True, "bias": "none", "fan_in_fan_out": False},
        {"merge_weights": True, "dtype": "float32", "tensor_parallel_degree": 2, "use_quick_lora": True},
        {"modules_to_save": None, "layers_to_transform": None, "loftq_config": {}},
    ],
)
@pytest.mark.parametrize("method", [method for _, method in PEFT_METHODS.items()])
def test_config_neutral_peft_argument_is_accepted(method: type, arguments: dict):
    assert method(**arguments) == method()


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"bias": "some"}, 'trainable_bias: "some" is not one of: none, all, adapted'),
        ({"task_type": TaskType.TOKEN_CLS}, "use CAUSAL_LM or SEQ_CLS"),
        ({"trainable_modules": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "eva"}, '"eva" is not one of: gaussian'),
        ({"init_lora_weights": False}, "init_lora_weights=False is not available, because B always starts at zero"),
        ({"pissa": True, "init_lora_weights": "gaussian"}, "the method computes the initial values"),
        ({"use_dora": True, "init_lora_weights": "pissa"}, "DoRAConfig and PiSSAConfig, .* choose one"),
    ],
)
def test_lora_config_unsupported_peft_argument_raises_with_a_remedy(arguments: dict, remedy: str):
    with pytest.raises(ValueError, match=remedy):
        LoRAConfig(**arguments)


def test_variant_config_with_another_variant_raises():
    with pytest.raises(ValueError, match="choose one"):
        DoRAConfig(pissa=True)
    assert type(DoRAConfig(use_dora=True)) is DoRAConfig


def test_config_option_under_two_names_raises():
    with pytest.raises(ValueError, match="r and lora_rank are the same option"):
        LoRAConfig(r=8, lora_rank=8)


def test_config_misspelled_argument_names_the_nearest():
    with pytest.raises(TypeError, match="has no argument 'lora_alhpa'; did you mean 'lora_alpha'"):
        LoRAConfig(lora_alhpa=8)


@pytest.mark.parametrize("method", [method for _, method in PEFT_METHODS.items()])
def test_config_signature_lists_the_fields(method: type):
    names = inspect.signature(method).parameters
    assert set(names) == set(argument_names(method).values())
    assert "path" in names


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("config_class", [LoRAConfig, LoHaConfig])
def test_pattern_that_is_not_a_regular_expression_is_located(config_class: type, name: str):
    with pytest.raises(ValueError, match=rf"{config_class.__name__}\.{name}: '\(' is not a regular expression"):
        config_class(r=4, **{name: {"(": 2}})
