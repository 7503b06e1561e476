"""Checks of output_dir, checkpoint folders, pruning, and the best checkpoint of a run."""

from __future__ import annotations

import dataclasses
import json

import pytest

from paddlenlp_ext import LoRAConfig
from paddlenlp_ext.cli.run_finetune import run_program
from paddlenlp_ext.trainer.checkpoints.output_dir import (
    check_output_dir,
    clear_leftovers,
    list_checkpoints,
    prune_checkpoints,
    resume_candidates,
)
from paddlenlp_ext.trainer.finetune import dpo, finetune, reward
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.utils import locks
from paddlenlp_ext.utils.files import write_json
from tests.common.processes import another_process
from tests.common.training import Rows, Tokenizer, assert_same_bits, make_config, make_model, weights

ROWS, DEV = Rows(16, seed=3), Rows(4, seed=4)


def make_trainer(folder, dev=None, callbacks=(), **keys):
    return Trainer(make_model(lora=True), make_config(folder, **keys), ROWS, dev, Tokenizer(), callbacks=callbacks)


def checkpoint(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    return path


def test_check_output_dir_with_a_run_names_both_remedies(tmp_path):
    make_trainer(tmp_path).train()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-plans").mkdir()
    checkpoint(tmp_path, 99)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint: true.* overwrite_output_dir: true"):
        make_trainer(tmp_path).train()
    again = make_trainer(tmp_path, overwrite_output_dir=True, max_steps=2)
    again.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "all_results.json", "checkpoint-plans", "history.jsonl", "metrics.jsonl", "notes.txt", "report.html",
        "run_config.json", "train_results.json", "trainer_state.json",
    ]  # fmt: skip
    assert [entry["step"] for entry in again.state.log_history] == [1, 2]


@pytest.mark.parametrize("start", [finetune, dpo, reward])
def test_run_in_the_output_dir_of_an_active_run_ends_before_it_changes_anything(start, tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "EXIT_PATIENCE_S", 0.0)
    interrupted = tmp_path / ".checkpoint-1.replaced"
    interrupted.mkdir()
    keys = {
        "model_name_or_path": "missing",
        "dataset_name_or_path": str(tmp_path),
        "output_dir": str(tmp_path),
        "do_train": True,
    }
    with another_process(locks.run_lock(tmp_path)) as process:
        with pytest.raises(ValueError, match=f"in use by a run, process {process} on"):
            start(keys, overwrite_output_dir=True, resume_from_checkpoint=True)
        assert {path.name for path in tmp_path.iterdir()} == {interrupted.name, locks.RUN_LOCK}


def test_trainer_in_the_output_dir_of_an_active_run_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "EXIT_PATIENCE_S", 0.0)
    trainer = make_trainer(tmp_path, DEV)
    with another_process(locks.run_lock(tmp_path)):
        for write in (trainer.train, trainer.evaluate, trainer.save_model):
            with pytest.raises(ValueError, match="in use by a run"):
                write()
        with pytest.raises(ValueError, match="in use by a run"):
            run_program(make_config(tmp_path, audit_only=True))
        assert [path.name for path in tmp_path.iterdir()] == [locks.RUN_LOCK]
    trainer.train()
    assert not (tmp_path / locks.RUN_LOCK).exists()


def test_check_output_dir_models_own_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the folder of the model"):
        make_trainer(tmp_path, model_name_or_path=str(tmp_path), overwrite_output_dir=True).train()


@pytest.mark.parametrize("inside", ["", "checkpoint-4"])
def test_check_output_dir_overwriting_the_start_is_an_error(tmp_path, inside):
    checkpoint(tmp_path, 4)
    start = str(tmp_path / inside)
    config = make_config(tmp_path, overwrite_output_dir=True)
    over_model = make_config(tmp_path, overwrite_output_dir=True, model_name_or_path=start)
    with pytest.raises(ValueError, match=r"the folder of the model|would remove from output_dir"):
        check_output_dir(over_model)
    with pytest.raises(ValueError, match="would remove from output_dir"):
        check_output_dir(dataclasses.replace(config, peft=LoRAConfig(path=start)))
    check_output_dir(dataclasses.replace(config, peft=LoRAConfig()))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"])
def test_check_output_dir_weights_of_no_run_are_an_error(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"{name}.*overwrite_output_dir: true"):
        check_output_dir(make_config(tmp_path))
    check_output_dir(make_config(tmp_path, overwrite_output_dir=True))
    check_output_dir(make_config(tmp_path, do_train=False, do_eval=True))


@pytest.mark.parametrize("below", ["", "runs/one"])
def test_check_output_dir_file_is_an_error(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is not a directory"):
        check_output_dir(make_config(tmp_path / "file" / below))


def test_check_output_dir_not_writable_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ValueError, match="is not writable"):
        check_output_dir(make_config(tmp_path / "runs" / "one"))


def test_resume_candidates_are_the_newest_first(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint; remove the key"):
        resume_candidates(tmp_path, True)
    assert resume_candidates(tmp_path, "auto") == []
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / ".checkpoint-9.incomplete").mkdir()
    checkpoint(tmp_path, 4).rename(tmp_path / ".checkpoint-4.replaced")
    checkpoint(tmp_path, 10)
    assert resume_candidates(tmp_path, None) == []
    for resume in (True, "auto"):
        assert [path.name for path in resume_candidates(tmp_path, resume)] == [
            "checkpoint-10", "checkpoint-8", "checkpoint-4",
        ]  # fmt: skip
    assert list(list_checkpoints(tmp_path)) == [4, 10]
    with pytest.raises(ValueError, match=r"checkpoint-8' is not a checkpoint"):
        resume_candidates(tmp_path, str(tmp_path / "checkpoint-8"))


def test_save_checkpoint_has_all_files_and_no_pickle(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    names = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert names == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "run_config.json", "trainer_state.json",
        "training_state.json", "training_state.safetensors", "manifest.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "checkpoint-2" / "run_config.json").read_text())["max_length"] == 32


@pytest.mark.parametrize(("limit", "remaining"), [(None, [1, 2, 3, 4]), (0, [1, 2, 3, 4]), (2, [3, 4]), (1, [4])])
def test_prune_checkpoints_keeps_the_newest(tmp_path, limit, remaining):
    make_trainer(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=limit).train()
    assert list(list_checkpoints(tmp_path)) == remaining


class ScriptedTrainer(Trainer):
    """Trainer whose evaluations return given losses and accuracies."""

    def script(self, losses, accuracies):
        self.measures = [
            {"eval_loss": loss, "eval_accuracy": accuracy} for loss, accuracy in zip(losses, accuracies, strict=True)
        ]
        self.seen = {}
        self.evaluator.metrics = self.next_measures
        return self

    def next_measures(self):
        self.seen[self.state.step] = weights(self.model)
        return self.measures.pop(0)


@pytest.mark.parametrize(
    ("metric", "greater", "best"),
    [(None, None, 2), ("accuracy", None, 3), ("eval_loss", None, 2), ("loss", True, 4), ("accuracy", False, 1)],
)
def test_trainer_best_model_is_kept_and_loaded_at_the_end(tmp_path, metric, greater, best):
    config = make_config(
        tmp_path,
        evaluation_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        greater_is_better=greater,
    )
    trainer = ScriptedTrainer(make_model(lora=True), config, ROWS, DEV, Tokenizer())
    trainer.script([4.0, 1.0, 3.0, 5.0], [0.1, 0.2, 0.6, 0.4]).train()
    assert trainer.state.best_step == best
    assert list(list_checkpoints(tmp_path)) == sorted({best, 4})
    assert_same_bits(weights(trainer.model), trainer.seen[best])


def test_trainer_missing_best_checkpoint_resets_the_best_metric(tmp_path):
    keys = {
        "evaluation_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }

    def scripted(folder, losses, **more):
        config = make_config(folder, **keys, **more)
        trainer = ScriptedTrainer(make_model(lora=True), config, ROWS, DEV, Tokenizer())
        return trainer.script(losses, [0.0] * len(losses))

    scripted(tmp_path / "a", [1.0, 2.0, 3.0, 4.0]).train()
    resumed = scripted(tmp_path / "b", [5.0, 6.0], resume_from_checkpoint=str(tmp_path / "c"))
    (tmp_path / "a" / "checkpoint-2").rename(tmp_path / "c")
    resumed.train()
    assert (resumed.state.best_step, resumed.state.best_metric) == (3, 5.0)
    assert_same_bits(weights(resumed.model), resumed.seen[3])


def test_clear_leftovers_removes_interrupted_checkpoints(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    for name in (".checkpoint-9.incomplete", ".checkpoint-1.removed"):
        (tmp_path / name).mkdir()
    make_trainer(tmp_path, resume_from_checkpoint=True).train()
    assert not list(tmp_path.glob(".checkpoint*"))
    assert list(list_checkpoints(tmp_path)) == [2, 4]


def test_trainer_best_model_without_evaluations_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="evaluation_strategy"):
        make_trainer(tmp_path, DEV, load_best_model_at_end=True)
    with pytest.raises(ValueError, match="needs eval rows"):
        make_trainer(tmp_path, evaluation_strategy="epoch")
    with pytest.raises(ValueError, match=r"metric_for_best_model rougel .* needs eval_with_do_generation"):
        make_trainer(tmp_path, DEV, metric_for_best_model="eval_rougel", evaluation_strategy="epoch")


@pytest.mark.parametrize("writer", ["_save_tokenizer", "save_training_state", "write_json"])
def test_save_checkpoint_failure_leaves_no_checkpoint(tmp_path, monkeypatch, writer):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2)
    monkeypatch.setattr(f"paddlenlp_ext.trainer.checkpoints.save_and_restore.{writer}", _disk_full)
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    assert not list_checkpoints(tmp_path)
    assert not list(tmp_path.glob(".checkpoint*"))


def test_save_checkpoint_writes_the_progress_last(tmp_path, monkeypatch):
    """Check that a folder with trainer_state.json has everything else except the manifest, which has the sum of it."""
    present = {}

    def record_and_write(path, content):
        present[path.name] = {other.name for other in path.parent.iterdir()}
        write_json(path, content)

    monkeypatch.setattr("paddlenlp_ext.trainer.checkpoints.save_and_restore.write_json", record_and_write)
    make_trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    files = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert present["trainer_state.json"] == files - {"trainer_state.json", "manifest.json"}


def _disk_full(*arguments):
    raise OSError("disk full")


def test_prune_checkpoints_interrupted_leaves_no_broken_checkpoint(tmp_path, monkeypatch):
    for step in (2, 4, 6):
        (checkpoint(tmp_path, step) / "model.safetensors").write_text("")

    def remove_half(path, **options):
        if path.is_dir():
            (path / "model.safetensors").unlink()
            raise OSError("interrupted")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="interrupted"):
        patch.setattr("shutil.rmtree", remove_half)
        prune_checkpoints(tmp_path, 1, step=6, keep=())
    assert all((path / "model.safetensors").exists() for path in list_checkpoints(tmp_path).values())
    assert list(list_checkpoints(tmp_path)) == [4, 6]
    clear_leftovers(tmp_path)
    prune_checkpoints(tmp_path, 1, step=6, keep=(4,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_prune_checkpoints_does_not_count_damaged_ones_of_later_steps(tmp_path):
    for step in (2, 4, 5, 8):
        checkpoint(tmp_path, step)
    prune_checkpoints(tmp_path, 1, step=5, keep=(2,))
    assert list(list_checkpoints(tmp_path)) == [2, 5, 8]


def test_clear_leftovers_restores_a_replaced_checkpoint(tmp_path):
    checkpoint(tmp_path, 4).rename(tmp_path / ".checkpoint-4.replaced")
    checkpoint(tmp_path, 6)
    (tmp_path / ".checkpoint-6.replaced").mkdir()
    clear_leftovers(tmp_path)
    assert list(list_checkpoints(tmp_path)) == [4, 6] and len(list(tmp_path.iterdir())) == 2


def test_check_output_dir_checkpoint_from_elsewhere_does_not_allow_mixing_runs(tmp_path):
    keys = {"save_strategy": "steps", "save_steps": 2}
    for name in ("a", "b"):
        make_trainer(tmp_path / name, **keys).train()
    elsewhere = {"resume_from_checkpoint": str(tmp_path / "a" / "checkpoint-2"), **keys}
    with pytest.raises(ValueError, match="already has a run"):
        check_output_dir(make_config(tmp_path / "b", **elsewhere))
    make_trainer(tmp_path / "b", overwrite_output_dir=True, max_steps=3, **elsewhere).train()
    assert list(list_checkpoints(tmp_path / "b")) == []
    assert json.loads((tmp_path / "b" / "trainer_state.json").read_text())["step"] == 3


def test_trainer_changed_best_metric_resets_the_best_checkpoint(tmp_path):
    keys = {"evaluation_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}

    def scripted(**more):
        config = make_config(tmp_path, load_best_model_at_end=True, **(keys | more))
        return ScriptedTrainer(make_model(lora=True), config, ROWS, DEV, Tokenizer())

    scripted(max_steps=2).script([0.1, 0.2], [0.5, 0.6]).train()
    resumed = scripted(metric_for_best_model="accuracy", resume_from_checkpoint=True)
    resumed.script([3.0, 4.0], [0.05, 0.04]).train()
    assert (resumed.state.best_name, resumed.state.best_step, resumed.state.best_metric) == ("accuracy", 3, 0.05)


def test_clear_run_leaves_no_full_model_next_to_an_adapter(tmp_path):
    for lora in (False, True):
        config = make_config(tmp_path, overwrite_output_dir=True, max_steps=1)
        trainer = Trainer(make_model(lora=lora), config, ROWS, None, Tokenizer())
        trainer.train()
        trainer.save_model()
    assert not (tmp_path / "config.json").exists() and (tmp_path / "adapter_config.json").exists()
