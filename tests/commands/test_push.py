"""Command `pnx push`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlenlp_ext.commands import pnx
from tests.common.hub import FakeHub


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return the folder `my-run` of a run that has not ended; it has a checkpoint with an adapter."""
    checkpoint = tmp_path / "my-run" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for name in ("adapter_model.safetensors", "trainer_state.json", "training_state.safetensors"):
        (checkpoint / name).touch()
    return tmp_path / "my-run"


def test_push_uploads_the_newest_checkpoint_under_the_name_of_the_run(hub: FakeHub, run_folder, capsys):
    pnx.run(["push", str(run_folder)])
    assert set(hub.files["user/my-run"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert capsys.readouterr().out == "uploaded to https://huggingface.co/user/my-run\n"


def test_push_reads_the_repository_from_the_run_and_arguments_override_it(hub: FakeHub, run_folder):
    keys = {"hub_model_id": "org/named", "hub_private_repo": True}
    (run_folder / "checkpoint-2" / "run_config.json").write_text(json.dumps(keys))
    pnx.run(["push", str(run_folder)])
    (run_folder / "checkpoint-2" / "run_config.json").write_text('{"hub_model_id": "org/named"}')
    pnx.run(["push", str(run_folder), "--repo", "org/other"])
    pnx.run(["push", str(run_folder), "--repo", "org/third", "--private"])
    assert hub.repositories == {"org/named": True, "org/other": None, "org/third": True}


def test_push_writes_a_model_card_beside_the_weights(hub: FakeHub, run_folder):
    start = {"event": "start", "step": 0, "time": 0.0, "kind": "sft", "changed_keys": {"lora_rank": [4, 8]}}
    (run_folder / "history.jsonl").write_text(json.dumps(start) + "\n")
    pnx.run(["push", str(run_folder), "--repo", "org/name"])
    assert b'"lora_rank": 4' in hub.files["org/name"]["README.md"]
