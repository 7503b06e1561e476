"""P-tuning: refused options, the stored prompt, dropout; numbers are in test_prefix_prompt_golden.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddlenlp_ext.peft.methods.p_tuning import PTuningConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, tiny_model, train

LSTM: dict[str, Any] = {"num_tokens": 3, "encoder": "lstm", "encoder_hidden_size": 5}


@pytest.mark.parametrize(
    "options", [{"encoder_num_layers": 3}, {"encoder_dropout": 0.1}, {"encoder": "none", "encoder_num_layers": 1}]
)
def test_p_tuning_option_of_another_encoder_raises(options: dict[str, Any]):
    with pytest.raises(ValueError, match="the last two are options of the LSTM"):
        PTuningConfig(**options)


@pytest.mark.parametrize("options", [LSTM, {"num_tokens": 3, "encoder_hidden_size": 5}])
def test_p_tuning_folder_without_network_gives_the_same_logits_and_trains(options: dict[str, Any], tmp_path: Path):
    """Remove the network's tensors, as in PEFT's folders: the prompt is loaded, and trained itself."""
    model = get_peft_model(tiny_model(), PTuningConfig(**options))
    train(model, steps=2)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored["prompt_embeddings"].shape == (3, 36) and len(stored) > 1
    save_file({"prompt_embeddings": stored["prompt_embeddings"]}, tmp_path / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert loaded.peft_config.encoder == "none"
    np.testing.assert_allclose(logits_of(loaded), logits_of(model), atol=1e-5)
    before = logits_of(loaded)
    train(loaded, steps=1)
    assert np.abs(logits_of(loaded) - before).max() > 1e-4


def test_p_tuning_dropout_depends_on_the_seed_only():
    options = {**LSTM, "encoder_num_layers": 3, "encoder_dropout": 0.5}
    model = get_peft_model(tiny_model(), PTuningConfig(**options))
    ids = paddle.to_tensor([[1, 2, 3]])

    def hidden(seed: int, state: int) -> np.ndarray:
        model.set_dropout_seed(seed)
        paddle.seed(state)
        return model.hidden_states(ids).numpy()

    model.train()
    assert np.array_equal(hidden(1, 1), hidden(1, 2))
    assert not np.array_equal(hidden(1, 1), hidden(2, 1))
    model.eval()
    assert np.array_equal(hidden(1, 1), hidden(2, 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_transformer_submodules": 2}, "unsupported fields: num_transformer_submodules=2"),
        ({"encoder_reparameterization_type": "GRU"}, "encoder_reparameterization_type='GRU' is not supported"),
        ({"num_virtual_tokens": None}, "num_virtual_tokens is missing"),
    ],
)
def test_p_tuning_peft_file_with_unsupported_field_raises(fields: dict[str, Any], message: str, tmp_path: Path):
    get_peft_model(tiny_model(), PTuningConfig(num_tokens=3)).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
