"""What the training programs print after a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paddlenlp_ext.checkpoint.hub_upload import UploadError
from paddlenlp_ext.cli import run_finetune as module
from paddlenlp_ext.cli.run_finetune import run_finetune, run_program
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.reward import RewardConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.peft.methods.lora import LoraConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixConfig
from tests.common.hub import snapshot_download_of

TRAINED = RunConfig(train=TrainConfig(output_dir="out", do_train=True))


@pytest.fixture(autouse=True)
def run(monkeypatch):
    monkeypatch.setattr(module, "run_training", lambda config: None)
    monkeypatch.setattr("paddlenlp_ext.cli.next_steps.program", lambda: ["pnx"])


@pytest.mark.parametrize(
    ("config", "command", "missing"),
    [
        (replace(TRAINED, peft=LoraConfig()), "pnx merge out -o out-merged", "predict"),
        (replace(TRAINED, peft=PrefixConfig()), "pnx chat out", "merge"),
        (TRAINED, "pnx export gguf out -o out.gguf", "merge"),
        (replace(TRAINED, reward=RewardConfig()), "pnx predict out -d ROWS.jsonl", "chat"),
    ],
)
def test_run_program_ends_with_commands_that_fit_the_result(config, command, missing, capsys):
    run_program(config)
    printed = capsys.readouterr().out
    assert f"  {command}\n" in printed and missing not in printed


@pytest.mark.parametrize(("config", "rank"), [(TRAINED, "1"), (RunConfig(train=TrainConfig(do_eval=True)), "0")])
def test_run_program_prints_no_commands_on_other_ranks_or_without_training(config, rank, monkeypatch, capsys):
    monkeypatch.setenv("PADDLE_TRAINER_ID", rank)
    run_program(config)
    assert capsys.readouterr().out == ""


def test_run_program_after_a_failed_upload_prints_the_commands_and_raises(monkeypatch, capsys):
    def fail(config: RunConfig) -> None:
        raise UploadError("push_to_hub: the upload failed")

    monkeypatch.setattr(module, "run_training", fail)
    with pytest.raises(UploadError, match="push_to_hub: the upload failed"):
        run_program(TRAINED)
    assert capsys.readouterr().out.startswith("Results: out\nNext:\n  pnx chat out\n")


@pytest.mark.parametrize(
    ("command", "printed"), [("dry_run", "optimizer steps"), ("preview_data", "legend: "), ("audit_only", "")]
)
def test_run_finetune_that_reads_no_weights_downloads_none(command, printed, run_folders: Path, monkeypatch, capsys):
    cached = run_folders / "cached"
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download_of(run_folders / "model", cached))
    keys = {"dataset_name_or_path": "data", "data_cache_dir": "cache", "output_dir": "out"}
    paths = [word for key, name in keys.items() for word in (f"--{key}", str(run_folders / name))]
    options = ["--do_train", "true", "--device", "cpu", "--chat_template", "none", f"--{command}", "1"]
    run_finetune(["--model_name_or_path", "team/model", *paths, *options])
    assert printed in capsys.readouterr().out
    assert (cached / "tokenizer_config.json").exists() and not list(cached.glob("*.safetensors"))
