"""`push_to_hub` of a run: checks before the data is read, the upload after the last evaluation, and its failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import paddlenlp_ext
from paddlenlp_ext.checkpoint.hub_upload import UploadError
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import load_data
from tests.common.hub import FakeHub
from tests.trainer.test_finetune import keys_of


def push_keys(folder: Path, **more: Any) -> dict[str, Any]:
    return keys_of(folder, push_to_hub=True, hub_model_id="org/name", **more)


def test_finetune_with_push_to_hub_uploads_adapter_tokenizer_and_results(hub: FakeHub, run_folders: Path):
    result = paddlenlp_ext.finetune(push_keys(run_folders, hub_private_repo=True, save_strategy="epoch"))
    assert hub.repositories == {"org/name": True}
    uploaded = hub.files["org/name"]
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(uploaded)
    assert json.loads(uploaded["all_results.json"])["eval_loss"] == result.metrics["eval_loss"]
    assert b"| `eval_loss` |" in uploaded["README.md"] and str(run_folders).encode() not in uploaded["README.md"]
    assert not [name for name in uploaded if "/" in name or name.startswith(("run_config", "trainer", "history"))]


def test_finetune_without_token_raises_before_the_data_is_read(hub: FakeHub, run_folders: Path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="push_to_hub: no token"):
        paddlenlp_ext.finetune(push_keys(run_folders, dataset_name_or_path=run_folders / "missing"))


def test_finetune_with_failing_upload_keeps_the_run(hub: FakeHub, run_folders: Path):
    hub.failure = ConnectionError("no route")
    with pytest.raises(ValueError, match=r"training is complete and saved in .*out; to repeat the upload: pnx push"):
        paddlenlp_ext.finetune(push_keys(run_folders))
    out = run_folders / "out"
    assert "eval_loss" in json.loads((out / "all_results.json").read_text())
    assert paddlenlp_ext.AutoPeftModelForCausalLM.from_pretrained(out)


def test_trainer_with_push_to_hub_uploads_the_model_at_the_end_of_train(hub: FakeHub, run_folders: Path):
    config = paddlenlp_ext.load_config(push_keys(run_folders, do_eval=False))
    trainer = build_trainer(config, load_data(config))
    trainer.train()
    assert {"adapter_model.safetensors", "train_results.json"} <= set(hub.files["org/name"])
    hub.failure = ConnectionError("no route")
    with pytest.raises(UploadError, match="push_to_hub: the upload to org/name failed"):
        trainer.push_to_hub()
