"""`merge_adapter` and `unmerge_adapter`, as Hugging Face PEFT's documentation uses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.common.adapters import default_config, logits_of, state_of, tiny_model, train

MERGEABLE = [name for name, method in PEFT_METHODS.items() if method.mergeable and not method.needs_quantized_base]
PROMPTS = [[3, 5, 7], [2, 9]]


def trained(config: object, family: str = "llama") -> PeftModel:
    model = get_peft_model(tiny_model(family), config)
    train(model, steps=2)
    model.eval()
    return model


def test_merge_snippet_of_peft():
    """Written from PEFT's guide "Model merging"; only the import line differs."""
    from paddlenlp_ext.peft import LoraConfig, get_peft_model

    base_model = tiny_model()
    config = LoraConfig(r=4)
    model = get_peft_model(base_model, config)
    train(model, steps=2)
    model.eval()
    expected = model.generate(PROMPTS, max_new_tokens=4, do_sample=False)

    # merge the adapter into the base model's weights, and undo it
    model.merge_adapter()
    assert model.generate(PROMPTS, max_new_tokens=4, do_sample=False) == expected
    model.unmerge_adapter()
    assert model.generate(PROMPTS, max_new_tokens=4, do_sample=False) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("switch", MERGEABLE)
def test_merge_adapter_of_every_method_keeps_logits_and_is_undone_to_the_bit(switch: str, family: str):
    model = trained(default_config(switch), family)
    before, state = logits_of(model), state_of(model)
    model.merge_adapter()
    assert not list(adapter_layers(model))
    np.testing.assert_allclose(logits_of(model), before, atol=2e-5 * max(1, np.abs(before).max()))
    model.unmerge_adapter()
    assert np.array_equal(logits_of(model), before)
    assert all(np.array_equal(value, state[name]) for name, value in state_of(model).items())


def test_merged_adapter_is_saved_and_disabled_as_before_the_merge(tmp_path: Path):
    model = trained(LoRAConfig(r=2, modules_to_save=["norm"]))
    model.save_pretrained(tmp_path / "before")
    expected, base = logits_of(model), logits_of(tiny_model())
    model.merge_adapter(adapter_names=["default"], safe_merge=True)
    merged = logits_of(model)
    np.testing.assert_allclose(merged, expected, atol=1e-5)
    model.save_pretrained(tmp_path / "merged")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "merged" / name).read_bytes()
    with model.disable_adapter():
        assert np.array_equal(logits_of(model), base)
    assert np.array_equal(logits_of(model), merged)


def test_actions_that_a_merged_adapter_excludes_name_the_remedy(tmp_path: Path):
    model = trained(LoRAConfig(r=2))
    model.add_adapter("other", LoRAConfig(r=1))
    model.save_pretrained(tmp_path)
    model.merge_adapter()
    actions = {
        "set_adapter": lambda: model.set_adapter("other"),
        "adding an adapter": lambda: model.add_adapter("third", LoRAConfig(r=1)),
        "merge_adapter": model.merge_adapter,
        "loading an adapter": lambda: model.load_weights(tmp_path),
        "training": lambda: model.hooks,
    }
    for action, run in actions.items():
        with pytest.raises(ValueError, match=rf"{action}: adapter 'default' is merged; call unmerge_adapter\(\) first"):
            run()
    model.unmerge_adapter()
    with pytest.raises(ValueError, match=r"no adapter is merged; call merge_adapter\(\)"):
        model.unmerge_adapter()
    with pytest.raises(ValueError, match=r"only the active adapter 'default' can be merged in place"):
        model.merge_adapter(adapter_names=["other"])


def test_merge_adapter_refuses_quantized_bases_prompts_and_infinite_weights():
    quantized = tiny_model()
    quantize_linears(quantized, QuantizationConfig(algo="nf4"))
    with pytest.raises(ValueError, match=r"the base model is quantized.*merge_and_unload\(\)"):
        get_peft_model(quantized, LoRAConfig(r=2)).merge_adapter()
    with pytest.raises(ValueError, match="not a change of weights"):
        get_peft_model(tiny_model(), default_config("prompt_tuning")).merge_adapter()
    model = trained(LoRAConfig(r=2, target_modules=["q_proj"]))
    layer = next(iter(model.injected.values()))
    layer.lora_B.weight.set_value(layer.lora_B.weight * float("inf"))
    with pytest.raises(ValueError, match=r"q_proj: the merged weight has NaN or infinite values"):
        model.merge_adapter(safe_merge=True)
    assert list(adapter_layers(model))


def test_merged_adapter_can_be_unloaded():
    model, merged = trained(LoRAConfig(r=2)), trained(LoRAConfig(r=2))
    model.merge_adapter()
    merged.merge_adapter()
    assert np.array_equal(logits_of(model.unload()), logits_of(tiny_model()))
    expected = logits_of(merged)
    np.testing.assert_allclose(logits_of(merged.merge_and_unload()), expected, atol=1e-6)
