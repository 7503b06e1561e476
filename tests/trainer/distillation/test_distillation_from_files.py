"""Distillation with a teacher from files: vocabulary, stored log-probabilities, quantized teachers."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.config.errors import ConfigError
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.trainer.distillation.top_tokens import TopTokenStore
from paddlenlp_ext.trainer.finetune import FinetuneResult, finetune
from tests.common.models import TINY_LLAMA, write_tiny_model
from tests.common.training import assert_same_bits, weights


@pytest.fixture
def folders(run_folders: Path) -> Path:
    """Return `run_folders` with a teacher in `teacher/`, whose weights and sizes differ from the student's."""
    write_tiny_model(run_folders / "teacher")
    sizes = {"hidden_size": 40, "num_attention_heads": 4, "intermediate_size": 64}
    config = json.loads((run_folders / "model" / "config.json").read_text())
    AutoModelForCausalLM.from_config({**config, **sizes}, seed=9).save_pretrained(run_folders / "teacher")
    rows = (run_folders / "data" / "train.json").read_text().splitlines(keepends=True)
    (run_folders / "data" / "dev.json").write_text("".join(rows[:5]))
    return run_folders


def run(folders: Path, output: str, teacher: str | None = "teacher", **keys: Any) -> FinetuneResult:
    named = {} if teacher is None else {"teacher_model_name_or_path": str(folders / teacher)}
    return finetune(
        {
            "model_name_or_path": str(folders / "model"),
            "dataset_name_or_path": str(folders / "data"),
            "data_cache_dir": str(folders / "cache"),
            "output_dir": str(folders / output),
            "chat_template": "none",
            "device": "cpu",
            "do_train": True,
            "max_steps": 3,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "max_length": 32,
            "src_length": 16,
            "disable_tqdm": True,
            **named,
            **keys,
        }
    )


def stores(folders: Path) -> list[Path]:
    return sorted((folders / "logps").iterdir())


def test_second_run_trains_without_the_teacher_to_the_same_bits(folders: Path) -> None:
    keys = {"teacher_logps_path": str(folders / "logps"), "zero_padding": True, "lora": True, "do_eval": True}
    first = run(folders, "first", **keys)
    assert len(stores(folders)) == 2  # training rows and eval rows
    for store in stores(folders):
        ids, logps = (np.load(store / file) for file in ("ids.npy", "logps.npy"))
        assert (ids.dtype, logps.dtype, ids.shape) == (np.int32, np.float16, logps.shape)
        assert (np.diff(logps, axis=1) <= 0).all()
    second = run(folders, "second", teacher=None, **keys)
    assert_same_bits(weights(second.model), weights(first.model))
    assert second.metrics["eval_divergence"] == first.metrics["eval_divergence"]
    (folders / "teacher" / "model.safetensors").rename(folders / "moved")
    (folders / "moved").rename(folders / "teacher" / "model.safetensors")
    third = run(folders, "third", **keys)  # finds the log-probabilities of the same teacher
    assert_same_bits(weights(third.model), weights(first.model))


def test_stored_log_probabilities_of_other_settings_are_refused(folders: Path) -> None:
    keys = {"teacher_logps_path": str(folders / "logps")}
    run(folders, "first", **keys)
    with pytest.raises(ValueError, match=r"distillation_temperature was 1.0, now 2.0"):
        run(folders, "second", **keys, distillation_temperature=2.0)
    with pytest.raises(ValueError, match=r"teacher_top_k was 61, now 32"):
        run(folders, "second", **keys, teacher_top_k=32)
    AutoModelForCausalLM.from_config(TINY_LLAMA, seed=10).save_pretrained(folders / "teacher")
    with pytest.raises(ValueError, match=r"hash of the teacher's .* was \w+, now \w+"):
        run(folders, "second", **keys)
    with (folders / "data" / "train.json").open("a") as file:
        file.write('{"src": "red", "tgt": "blue"}\n')
    with pytest.raises(ValueError, match="set teacher_model_name_or_path"):
        run(folders, "second", teacher=None, **keys)


def test_interrupted_store_is_computed_again(folders: Path) -> None:
    keys = {"teacher_logps_path": str(folders / "logps")}
    first = run(folders, "first", **keys)
    (store,) = stores(folders)
    (store / "settings.json").unlink()
    np.save(store / "ids.npy", np.zeros_like(np.load(store / "ids.npy")))
    again = run(folders, "again", **keys)
    assert_same_bits(weights(again.model), weights(first.model))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("settings.json", b"{", "settings.json:1:2: damaged or not JSON"),
        ("settings.json", b"{}", "vocab_size was None, now 61"),
        ("ids.npy", b"", "ids.npy cannot be read"),
        ("ids.npy", None, "ids.npy cannot be read"),
    ],
)
def test_damaged_store_is_refused_by_file(folders: Path, file: str, content: bytes | None, message: str) -> None:
    keys = {"teacher_logps_path": str(folders / "logps"), "max_steps": 1}
    run(folders, "first", **keys)
    damaged = stores(folders)[0] / file
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run(folders, "second", teacher=None, **keys)


def test_store_with_another_dtype_is_refused(folders: Path) -> None:
    keys = {"teacher_logps_path": str(folders / "logps"), "max_steps": 1}
    run(folders, "first", **keys)
    file = stores(folders)[0] / "ids.npy"
    np.save(file, np.load(file).astype(np.float32))
    with pytest.raises(ValueError, match="wrong shape or dtype; delete the folder"):
        run(folders, "second", teacher=None, **keys)


def test_store_on_a_full_disk_is_refused_before_the_teacher_runs(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    monkeypatch.setattr(TopTokenStore, "_most_likely", None)
    with pytest.raises(ValueError, match=r"logps/\w+: no space is left on the device; free some space"):
        run(folders, "out", teacher_logps_path=str(folders / "logps"))
    with pytest.raises(ValueError, match=r"teacher_logps_path: .*train.json is not a directory"):
        run(folders, "out", teacher_logps_path=str(folders / "data" / "train.json"))


def test_teacher_with_another_vocabulary_is_refused(folders: Path) -> None:
    file = folders / "teacher" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["red"], vocabulary["blue"] = vocabulary["blue"], vocabulary["red"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="has another vocabulary than the trained model"):
        run(folders, "out")


def test_missing_file_of_the_teacher_is_an_error_with_the_name_of_the_key(folders: Path) -> None:
    with pytest.raises(ValueError, match=r"teacher_model_name_or_path: no model '.*nothing'"):
        run(folders, "out", teacher="nothing")
    for file in ("model.safetensors", "tokenizer.json", "config.json"):  # each is found before the one before it
        (folders / "teacher" / file).unlink()
        with pytest.raises(ValueError, match=rf"teacher_model_name_or_path: .*{file.split('.')[0]}"):
            run(folders, "out", teacher="teacher", overwrite_output_dir=True)


def test_rows_longer_than_the_context_of_the_teacher_are_a_warning(
    folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = folders / "teacher" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 4}))
    run(folders, "out", max_steps=1)
    assert "12 of 12 training rows are longer than the teacher's context of 4 positions; lower" in caplog.text


def test_quantized_teacher_distills(folders: Path) -> None:
    plain = run(folders, "plain").metrics["train_loss"]
    quantized = run(folders, "quantized", teacher_weight_quantize_algo="weight_only_int8").metrics["train_loss"]
    assert quantized == pytest.approx(plain, rel=0.05) and quantized != plain


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lazy": True, "teacher_logps_path": "logps"}, "the rows of a stream are not numbered"),
        ({"use_pose_convert": True, "teacher_logps_path": "logps"}, "position ids of a row change"),
        ({"sharding": "stage3"}, "distillation compares full logits"),
    ],
)
def test_distillation_refuses_combinations_by_name(folders: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(folders, "out", **keys)


def test_resumed_run_with_another_teacher_is_refused(folders: Path) -> None:
    keys = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    run(folders, "out", **keys)
    for changes in ({"teacher": "model"}, {"teacher": None}, {"distillation_beta": 0.0}):
        with pytest.raises(ValueError, match="was trained with a different objective"):
            run(folders, "out", resume_from_checkpoint=True, **{**keys, **changes})


@pytest.mark.parametrize("key", ["teacher_model_name_or_path", "teacher_logps_path"])
def test_resumed_run_that_did_not_distill_is_refused_as_a_distillation(folders: Path, key: str) -> None:
    keys = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "teacher": None}
    run(folders, "out", **keys)
    with pytest.raises(ValueError, match=f"different objective: {key} was null, now"):
        run(folders, "out", resume_from_checkpoint=True, **{**keys, "max_steps": 2, key: str(folders / "teacher")})


def test_run_config_has_the_keys_of_distillation_only_if_the_run_distills(folders: Path) -> None:
    run(folders, "distilled")
    run(folders, "tuned", teacher=None)
    written = [json.loads((folders / name / "run_config.json").read_text()) for name in ("distilled", "tuned")]
    assert [written_keys.get("distillation_beta") for written_keys in written] == [0.5, None]
