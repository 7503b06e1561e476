"""Damaged, mixed and incomplete checkpoints are found and named, and the last good one is resumed from."""

from __future__ import annotations

import builtins
import errno
import io
import json
import re
import shutil
import time
from pathlib import Path

import pytest

from paddlenlp_ext.checkpoint.checksum_manifest import write_manifest
from paddlenlp_ext.trainer.checkpoints.output_dir import list_checkpoints
from paddlenlp_ext.trainer.checkpoints.resume import checkpoint_damage, choose_checkpoint
from paddlenlp_ext.trainer.checkpoints.save_and_restore import write_checkpoint
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.utils.storage_errors import StorageError
from tests.common.training import (
    KillAfter,
    KilledError,
    Rows,
    Tokenizer,
    assert_same_bits,
    make_config,
    make_model,
    weights,
)

ROWS, DEV = Rows(16, seed=3), Rows(4, seed=4)
SAVES = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1.0}


def make_trainer(folder, dev=None, **keys):
    return Trainer(make_model(lora=True), make_config(folder, **(SAVES | keys)), ROWS, dev, Tokenizer())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with checkpoints of steps 2 and 4."""
    trainer = make_trainer(tmp_path_factory.mktemp("finished"))
    trainer.train()
    return trainer


@pytest.fixture
def run(finished, tmp_path):
    """Return a copy of the finished run's folder."""
    return Path(shutil.copytree(finished.output_dir, tmp_path / "run"))


def flip(position):
    def damage(path):
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return damage


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path):
    path.write_bytes(b"")


def take_older(path):
    older = path.parent.with_name("checkpoint-2") / path.name
    if older.read_bytes() == path.read_bytes():
        pytest.skip("equal in both checkpoints")
    shutil.copy(older, path)


FILES = [
    "adapter_config.json", "adapter_model.safetensors", "manifest.json", "run_config.json", "tokenizer.json",
    "trainer_state.json", "training_state.json", "training_state.safetensors",
]  # fmt: skip
DAMAGES = [flip(0), flip(0.5), flip(1), truncate, empty, Path.unlink, take_older]
NAMES = ["first bit", "middle bit", "last bit", "truncated", "emptied", "missing", "of an older checkpoint"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=NAMES)
def test_choose_checkpoint_with_a_damaged_file_takes_the_one_before(run, caplog_package, damage, file):
    newest = run / "checkpoint-4"
    assert {path.name for path in newest.iterdir()} == set(FILES)
    assert choose_checkpoint(run, True) == newest and not caplog_package
    damage(newest / file)
    # A manifest of another checkpoint names the files that differ from it.
    named = "SHA-256 sum is wrong" if damage is take_older and file == "manifest.json" else file
    if file not in ("manifest.json", "trainer_state.json"):
        named += {truncate: ": .* bytes instead of", empty: ": 0 bytes instead of", Path.unlink: ": missing"}.get(
            damage, ""
        )
    for resume in (True, "auto"):
        assert choose_checkpoint(run, resume) == run / "checkpoint-2"
    assert re.search(f"checkpoint-4: .*{named}", caplog_package[0])
    with pytest.raises(ValueError, match=rf"checkpoint-4.*{named}"):
        choose_checkpoint(run, str(newest))
    shutil.rmtree(run / "checkpoint-2")
    with pytest.raises(ValueError, match=rf"all checkpoints in .* are damaged: .*{named}"):
        choose_checkpoint(run, "auto")


@pytest.fixture
def caplog_package(monkeypatch):
    """Collect the warnings of trainer/checkpoints/resume.py."""
    messages = []
    monkeypatch.setattr(
        "paddlenlp_ext.trainer.checkpoints.resume.logger.warning", lambda text, *values: messages.append(text % values)
    )
    return messages


def test_checkpoint_damage_names_foreign_weights_and_steps(run):
    shutil.copy(run / "checkpoint-4" / "adapter_model.safetensors", run / "checkpoint-4" / "model.safetensors")
    (run / "checkpoint-4" / "notes.txt").write_text("mine")
    (run / "checkpoint-4").rename(run / "checkpoint-6")
    foreign, step = checkpoint_damage(run / "checkpoint-6")
    assert "model.safetensors: not in manifest.json" in foreign
    assert step == "the folder's name says step 6, but manifest.json says step 4"


def test_checkpoint_damage_names_an_unreadable_file_but_not_a_missing_permission(run, monkeypatch):
    def refuse(path):
        raise error

    monkeypatch.setattr("paddlenlp_ext.checkpoint.checksum_manifest.file_sha256", refuse)
    error = OSError(errno.EIO, "Input/output error")
    assert "adapter_config.json: cannot be read (Input/output error)" in checkpoint_damage(run / "checkpoint-4")
    error = PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(PermissionError):
        checkpoint_damage(run / "checkpoint-4")


def test_checkpoint_damage_without_manifest_checks_the_steps(run, caplog_package):
    folder, older = run / "checkpoint-4", run / "checkpoint-2"
    (folder / "manifest.json").unlink()
    stored = json.loads((folder / "training_state.json").read_text())
    del stored["state"]["has_manifest"]
    (folder / "training_state.json").write_text(json.dumps(stored))
    assert choose_checkpoint(run, True) == folder
    assert "because an earlier version of paddlenlp_ext wrote it" in caplog_package[0]
    shutil.copy(older / "trainer_state.json", folder)
    assert checkpoint_damage(folder) == ["training_state.json is from step 4, trainer_state.json from step 2"]
    (folder / "training_state.safetensors").write_bytes(b"")
    assert "training_state.safetensors: damaged" in checkpoint_damage(folder)[0]


def test_resume_from_the_last_good_checkpoint_ends_with_the_same_bits(run, finished):
    truncate(run / "checkpoint-4" / "adapter_model.safetensors")
    resumed = make_trainer(run, resume_from_checkpoint=True, save_total_limit=1)
    resumed.train()
    assert_same_bits(weights(resumed.model), weights(finished.model))
    assert list(list_checkpoints(run)) == [4] and checkpoint_damage(run / "checkpoint-4") == []


def test_resume_auto_begins_without_a_checkpoint_and_continues_with_one(tmp_path):
    (tmp_path / "trainer_state.json").write_text("{}")  # of a run that failed before its first checkpoint
    steps = []
    for max_steps in (2, 4, 4):
        trainer = make_trainer(tmp_path, resume_from_checkpoint="auto", max_steps=max_steps)
        trainer.train()
        steps.append((trainer.state.step, len(trainer.state.log_history)))
    assert steps == [(2, 2), (4, 4), (4, 4)]
    trainer.save_model()
    shutil.rmtree(tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match=r"has a model or adapter, adapter_model\.safetensors"):
        make_trainer(tmp_path, resume_from_checkpoint="auto").train()


def test_resume_reports_changed_keys_and_refuses_another_objective(run, caplog_package, monkeypatch):
    make_trainer(run, resume_from_checkpoint=True, weight_decay=0.5, logging_steps=7).train()
    assert caplog_package == [
        "the configuration has changed since checkpoint-4: weight_decay was 0.0, now 0.5. The run continues with the "
        "new values"
    ]
    monkeypatch.setattr("paddlenlp_ext.trainer.checkpoints.resume._OBJECTIVE_SECTIONS", ("optim",))
    with pytest.raises(ValueError, match=r"different objective: weight_decay was 0\.0, now 0\.5"):
        make_trainer(run, resume_from_checkpoint=True, weight_decay=0.5).train()


def test_trainer_damaged_best_checkpoint_is_not_loaded(tmp_path):
    keys = {"evaluation_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    trainer = make_trainer(tmp_path, DEV, **keys)
    trainer.evaluator.metrics = iter([{"eval_loss": loss} for loss in (1.0, 2.0, 3.0, 4.0)]).__next__
    save, kept = trainer._save, {}

    def save_and_damage():
        save()
        flip(0.5)(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
        kept.update(weights(trainer.model))

    trainer._save = save_and_damage
    trainer.train()
    assert trainer.state.best_step == 1
    assert_same_bits(weights(trainer.model), kept)


def test_async_save_completes_in_the_background_without_mixing_steps(tmp_path, monkeypatch, finished):
    step_at_completion = []

    def hash_late(folder, step):
        ends = time.monotonic() + 10.0
        while trainer.state.step == step < finished.state.step and time.monotonic() < ends:
            time.sleep(0.001)
        step_at_completion.append(trainer.state.step)
        assert not (tmp_path / f"checkpoint-{step}").exists()
        write_manifest(folder, step)

    monkeypatch.setattr("paddlenlp_ext.trainer.checkpoints.save_and_restore.write_manifest", hash_late)
    trainer = make_trainer(tmp_path, use_async_save=True)
    trainer.train()
    assert step_at_completion[0] > 2
    for step in (2, 4):
        folder, expected = (base / f"checkpoint-{step}" for base in (tmp_path, finished.output_dir))
        assert checkpoint_damage(folder) == []
        for file in expected.glob("*.safetensors"):
            assert (folder / file.name).read_bytes() == file.read_bytes(), file


@pytest.mark.parametrize("callbacks", [[], [KillAfter(3)]])
def test_async_save_failure_is_reported(tmp_path, monkeypatch, caplog, callbacks):
    """Fail in the background: the next save is an error, or the log has it if the run fails before."""

    def refuse(folder, step):
        raise StorageError("no space")

    monkeypatch.setattr("paddlenlp_ext.trainer.checkpoints.save_and_restore.write_manifest", refuse)
    config = make_config(tmp_path, **SAVES, use_async_save=True)
    trainer = Trainer(make_model(lora=True), config, ROWS, None, Tokenizer(), callbacks=callbacks)
    with pytest.raises(KilledError if callbacks else StorageError):
        trainer.train()
    assert ("checkpoint-2 was not saved: no space" in caplog.text) == bool(callbacks)
    assert trainer.state.step == 4 - len(callbacks) and not list(tmp_path.glob("*checkpoint-*"))


class OneFullDisk:
    """Stand-in for `open` that opens /dev/full instead of the file number `number` that is opened for writing."""

    def __init__(self, number):
        self.remaining, self.failed = number, False

    def __call__(self, file, mode="r", *arguments, real=builtins.open, **options):
        if "w" in mode:
            self.remaining -= 1
            if self.remaining == 0:
                self.failed, file = True, "/dev/full"
        return real(file, mode, *arguments, **options)


def test_save_checkpoint_on_a_full_disk_leaves_the_earlier_one(run, finished, monkeypatch):
    """Fill the disk at every file of the checkpoint in turn; the last attempt succeeds."""
    state, number, before = finished.state, 1, (run / "checkpoint-4" / "manifest.json").read_text()

    def save():
        write_checkpoint(
            run / "checkpoint-4", finished.model, Tokenizer(), finished.optimizer, finished.objective, state,
            finished.config, finished.process_group,
        )()  # fmt: skip

    while True:
        disk = OneFullDisk(number)
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", disk)
            patch.setattr(io, "open", disk)
            if number > len(FILES):
                save()
                break
            with pytest.raises(StorageError, match=r"checkpoint-4.*: no space is left on the device; free some"):
                save()
        assert disk.failed
        assert checkpoint_damage(run / "checkpoint-4") == [] and not list(run.glob(".*"))
        assert (run / "checkpoint-4" / "manifest.json").read_text() == before
        number += 1
    assert not disk.failed and checkpoint_damage(run / "checkpoint-4") == []


def test_save_model_on_a_full_disk_names_the_file(run, finished, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(StorageError, match=r"adapter_model.*: no space is left"):
        patch.setattr(builtins, "open", OneFullDisk(1))
        finished.save_model(run / "final")
    assert not list((run / "final").glob(".*"))
