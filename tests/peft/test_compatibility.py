"""Options of a resumed adapter: those that change the function of the stored tensors must be the checkpoint's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import logits_of, tiny_model, train


def trained(switch: str, **options: Any) -> PeftModel:
    model = get_peft_model(tiny_model(), PEFT_METHODS.get(switch)(**options))
    train(model, steps=2)
    return model


@pytest.mark.parametrize(
    ("switch", "before", "now", "message"),
    [
        ("lora", {"alpha": 16}, {"alpha": 4}, "lora_alpha changed from 16 to 4"),
        ("lora", {"alpha": 4}, {"alpha": 4, "rslora": True}, "rslora changed from False to True"),
        ("pissa", {"rank": 3}, {"rank": 3, "alpha": 6}, "lora_alpha changed from 3 to 6"),
        ("lokr", {}, {"alpha": 3}, "lokr_alpha changed from 8 to 3"),
        ("use_mora", {}, {"folding": "sharing"}, "mora_folding changed from 'rotated' to 'sharing'"),
        ("adapter", {}, {"kind": "parallel"}, "adapter_type changed from 'houlsby' to 'parallel'"),
        ("adapter", {}, {"activation": "relu"}, "adapter_activation changed from 'gelu' to 'relu'"),
        ("adapter", {}, {"scale": 4.0}, "adapter_scale changed from 1.0 to 4.0"),
        ("reft", {}, {"position": "l3"}, r"position changed from 'f7\+l7' to 'l3'"),
        ("reft", {}, {"act_fn": "relu"}, "act_fn changed from 'linear' to 'relu'"),
        ("oft", {}, {"neumann_terms": 5}, "oft_neumann_terms changed from 0 to 5"),
        ("p_tuning", {}, {"encoder": "lstm"}, "p_tuning_encoder changed from 'mlp' to 'lstm'"),
        ("trainable_tokens", {"indices": (1, 2)}, {"indices": (2, 1)}, "trainable_tokens_indices changed"),
        ("boft", {}, {"butterfly_factors": 2, "target_modules": ["q_proj"], "block_size": 2}, "boft_butterfly_factors"),
        ("hra", {}, {"gram_schmidt": True}, "hra_gram_schmidt changed from False to True"),
        ("miss", {}, {"variant": "mini"}, "miss_variant changed from 'balance' to 'mini'"),
        ("sora", {}, {"alpha": 7}, "sora_alpha changed from 32 to 7"),
        ("adalora", {}, {"alpha": 7}, "adalora_alpha changed from 24 to 7"),
    ],
)
def test_load_weights_with_another_function_option_raises(
    switch: str, before: dict[str, Any], now: dict[str, Any], message: str, tmp_path: Path
):
    trained(switch, **before).save_pretrained(tmp_path)
    other = get_peft_model(tiny_model(), PEFT_METHODS.get(switch)(**now))
    with pytest.raises(ValueError, match=message):
        other.load_weights(tmp_path)


@pytest.mark.parametrize(
    ("switch", "before", "now"),
    [
        ("lora", {}, {"dropout": 0.3, "plus_scale": 4.0, "target_modules": [".*_proj"]}),
        ("pissa", {}, {"svd": "exact"}),
        ("lora_ga", {}, {"ga_batches": 3}),
        ("sora", {}, {"sparse_lambda": 0.1, "penalty": 0.0}),
        ("adalora", {}, {"tinit": 5, "target_r": 4, "orth_reg_weight": 0.1}),
        ("prefix_tuning", {"num_tokens": 4}, {"num_tokens": 4, "init": "random", "dropout": 0.1}),
        ("prompt_tuning", {"num_tokens": 4}, {"num_tokens": 4, "init": "random"}),
        ("reft", {}, {"layers": "0;1"}),
        ("ia3", {}, {"feedforward_modules": ["mlp.down_proj"]}),
        ("hira", {}, {"dropout": 0.3}),
        ("shira", {}, {"random_seed": 5}),
        ("vera", {}, {"d_initial": 0.2, "projection_prng_key": 5}),
    ],
)
def test_load_weights_with_other_training_or_init_options_is_accepted(
    switch: str, before: dict[str, Any], now: dict[str, Any], tmp_path: Path
):
    model = trained(switch, **before)
    model.save_pretrained(tmp_path)
    other = get_peft_model(tiny_model(), PEFT_METHODS.get(switch)(**now))
    other.load_weights(tmp_path)
    other.eval()
    assert np.array_equal(logits_of(other), logits_of(model))


def test_load_weights_of_another_method_raises(tmp_path: Path):
    trained("lora").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"type LORA \(LoRAConfig\), but the run trains type LORA \(DoRAConfig\)"):
        get_peft_model(tiny_model(), PEFT_METHODS.get("use_dora")()).load_weights(tmp_path)


def test_load_weights_vera_keeps_the_stored_projection_key(tmp_path: Path):
    trained("vera", projection_prng_key=5).save_pretrained(tmp_path / "first")
    other = get_peft_model(tiny_model(), PEFT_METHODS.get("vera")(projection_prng_key=9))
    other.load_weights(tmp_path / "first")
    other.save_pretrained(tmp_path / "second")
    first, second = ((tmp_path / name / "adapter_config.json").read_text() for name in ("first", "second"))
    assert first == second
