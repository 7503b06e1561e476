"""State dicts of adapters, as Hugging Face PEFT's documentation uses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import default_config, logits_of, tiny_model, train


def test_state_dict_snippet_of_peft():
    """Written from PEFT's "Checkpoint format" and API reference; only the import line differs."""
    from paddlenlp_ext.peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    base_model = tiny_model()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base_model, config)
    train(model, steps=2)
    state_dict = get_peft_model_state_dict(model)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in state_dict
    assert all(".default." not in key for key in state_dict)

    other = get_peft_model(tiny_model(), config)
    load_result = set_peft_model_state_dict(other, state_dict)
    assert not load_result.unexpected_keys
    assert np.array_equal(logits_of(other), logits_of(model))


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_state_dict_equals_the_saved_file(switch: str, family: str, tmp_path: Path):
    from paddlenlp_ext.peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    method = PEFT_METHODS.get(switch)
    if method.needs_quantized_base:
        pytest.skip("needs a quantized base")
    model = get_peft_model(tiny_model(family), default_config(switch))
    train(model, steps=1)
    state = get_peft_model_state_dict(model)
    model.save_pretrained(tmp_path)
    stored = SafetensorsFile(tmp_path / "adapter_model.safetensors")
    assert sorted(state) == sorted(stored.names())
    assert all(np.array_equal(tensor.numpy(), stored.read(key)) for key, tensor in state.items())
    fresh = get_peft_model(tiny_model(family), model.peft_config, seed=7)
    set_peft_model_state_dict(fresh, state)
    assert np.array_equal(logits_of(fresh), logits_of(model))


def test_state_dict_of_an_inactive_adapter_and_of_given_values():
    from paddlenlp_ext.peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    model = get_peft_model(tiny_model(), LoraConfig(r=2, modules_to_save=["norm"]))
    model.add_adapter("other", LoraConfig(r=3))
    assert next(iter(get_peft_model_state_dict(model, adapter_name="other").values())).shape[0] == 3
    assert model.active_adapter == "default"
    doubled = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    state = get_peft_model_state_dict(model, state_dict=doubled)
    plain = get_peft_model_state_dict(model)
    assert all(np.array_equal(state[key].numpy(), 2 * plain[key].numpy()) for key in plain)
    with pytest.raises(ValueError, match="no adapter 'missing'"):
        get_peft_model_state_dict(model, adapter_name="missing")
    before = logits_of(model)
    with pytest.raises(ValueError, match="1 missing: "):
        set_peft_model_state_dict(model, dict(list(plain.items())[1:]))
    assert np.array_equal(logits_of(model), before)


def test_state_dict_of_bfloat16_values_is_loaded():
    from paddlenlp_ext.peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    model = get_peft_model(tiny_model(), LoraConfig(r=2))
    train(model, steps=1)
    rounded = {key: tensor.astype(paddle.bfloat16) for key, tensor in get_peft_model_state_dict(model).items()}
    set_peft_model_state_dict(model, rounded)
    for key, tensor in get_peft_model_state_dict(model).items():
        assert np.array_equal(tensor.numpy(), rounded[key].astype("float32").numpy()), key
