"""Text models of composite folders, compared with transformers (tests/golden/generators/make_composite_golden.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.composite_folder import text_config
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, SafetensorsFile, save_sharded
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.golden import DATA

FOLDER = DATA / "composite_model"
SPELLINGS = {
    "hub": {},
    "transformers 5": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
    },
}


def respelled(name: str, spelling: str, folder: Path) -> Path:
    """Copy a composite folder with other tensor names."""
    shutil.copytree(FOLDER / name, folder)
    source = SafetensorsFile(folder / "model.safetensors")
    tensors = {}
    for stored in source.names():
        values = source.read(stored).copy()
        for old, new in SPELLINGS[spelling].items():
            if stored.startswith(old):
                stored = stored.replace(old, new, 1)
        tensors[stored] = LazyTensor(values.shape, "float32", lambda values=values: values)
    save_sharded(folder, tensors)
    return folder


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("mistral3", "ministral3"),
        ("gemma3", "gemma3_text"),
        ("gemma4", "gemma4_text"),
        ("gemma4_e", "gemma4_text"),
        ("qwen3_5", "qwen3_5_text"),
        ("mistral4", "mistral4"),
    ],
)
@paddle.no_grad()
def test_composite_folder_loads_as_its_text_model(name, model_type, spelling, tmp_path):
    golden = np.load(FOLDER / name / "golden.npz")
    folder = respelled(name, spelling, tmp_path / "composite")
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(paddle.to_tensor(golden["ids"])).numpy()
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=2e-5)

    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == model_type and config["architectures"][0].endswith("ForCausalLM")
    assert "text_config" not in config and "vision_config" not in config
    names = model.config.file_layout.open(open_weights(tmp_path / "saved")).names()
    assert set(names) == {name for name, _ in model.named_parameters()}


@paddle.no_grad()
def test_text_model_under_the_names_of_its_composite_model_loads(tmp_path, caplog):
    """Test a folder as transformers saves a text model that it loaded from a composite folder, with other layers."""
    golden, tensors = np.load(FOLDER / "qwen3_5" / "golden.npz"), {}
    source = SafetensorsFile(FOLDER / "qwen3_5" / "model.safetensors")
    for name in source.names():
        if not name.startswith("model.visual."):
            values = source.read(name).copy()
            tensors[name] = LazyTensor(values.shape, "float32", lambda values=values: values)
    tensors["mtp.fc.weight"] = LazyTensor((2, 2), "float32", lambda: np.zeros((2, 2), np.float32))
    config = json.loads((FOLDER / "qwen3_5" / "config.json").read_text(encoding="utf-8"))["text_config"]
    save_sharded(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with caplog.at_level("INFO", logger="paddlenlp_ext"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_allclose(model(paddle.to_tensor(golden["ids"])).numpy(), golden["logits"], rtol=0, atol=2e-5)
    assert "not read: mtp (1 tensors)" in caplog.text


def test_open_weights_of_a_composite_folder_logs_the_parts_that_are_not_read(caplog):
    with caplog.at_level("INFO", logger="paddlenlp_ext"):
        names = open_weights(FOLDER / "mistral3").names()
    assert all(name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")) for name in names)
    assert "only the text model is loaded and saved; not read: " in caplog.text
    assert "vision_tower (" in caplog.text and "multi_modal_projector (" in caplog.text


def test_text_config_inherits_only_keys_that_it_lacks():
    composite = {
        "model_type": "outer",
        "eos_token_id": 3,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "vision_config": {"hidden_size": 1},
        "text_config": {"model_type": "llama", "hidden_size": 8, "tie_word_embeddings": False, "eos_token_id": None},
    }
    assert text_config(composite) == {
        "model_type": "llama",
        "hidden_size": 8,
        "tie_word_embeddings": False,
        "eos_token_id": 3,
        "dtype": "bfloat16",
    }
    assert text_config(composite["text_config"]) == composite["text_config"]
