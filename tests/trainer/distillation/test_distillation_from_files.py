"""Distillation with a teacher from files: vocabulary, stored log-probabilities, quantized teachers."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config.errors import ConfigError
from paddlenlp_ext.config.parser import load_run_config
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.distillation.top_tokens import TopTokenStore
from paddlenlp_ext.trainer.finetune import FinetuneResult, finetune
from paddlenlp_ext.trainer.objectives import distillation_objective
from paddlenlp_ext.trainer.objectives.distillation_objective import DistillationObjective
from paddlenlp_ext.trainer.single_process import SingleProcess
from tests.common.models import TINY_LLAMA, write_tiny_model
from tests.common.training import assert_same_bits, make_folder_config, weights


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
    with pytest.raises(ValueError, match="have different vocabularies"):
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


# -- adapters ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "keys",
    [
        {"lora_dropout": 0.2, "neftune": True, "distillation_sft_ratio": 0.5},
        {"recompute": True, "lora_target_modules": ["q_proj", "embed_tokens"]},
        {"distillation_lmbda": 0.5, "max_new_tokens": 4},
        {"lora": False, "prefix_tuning": True},
    ],
    ids=["dropout", "recompute", "on_policy", "prefix"],
)
def test_teacher_that_is_the_base_of_the_adapter_trains_as_with_a_copy(
    folders: Path, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"teacher": "model", "lora": True, "weight_decay": 0.0, **keys}
    with monkeypatch.context() as patch:
        patch.setattr(distillation_objective, "load_teacher", None)
        shared = run(folders, "shared", **keys)
    assert "teacher: the base model without the adapter" in caplog.text
    caplog.clear()
    monkeypatch.setattr(distillation_objective, "is_base_of", lambda *_: False)
    copied = run(folders, "copied", **keys)
    assert "teacher: the base model without the adapter" not in caplog.text
    assert copied.metrics["train_loss"] > 0
    assert_same_bits(weights(shared.model), weights(copied.model))


@pytest.mark.parametrize(
    "keys",
    [
        {"lora": False},
        {"weight_quantize_algo": "weight_only_int8"},
        {"teacher_weight_quantize_algo": "weight_only_int8"},
        {"lora_modules_to_save": "norm"},
        {"continue_training": False},
        {"use_long_sequence_strategies": True, "strategy_name": "linear", "rope_scaling_factor": 2.0},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_teacher_with_other_weights_than_the_base_is_loaded(
    folders: Path, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load = [], distillation_objective.load_teacher
    monkeypatch.setattr(distillation_objective, "load_teacher", lambda *of: loaded.append(of) or load(*of))
    run(folders, "out", **{"teacher": "model", "lora": True, "max_steps": 1, **keys})
    assert len(loaded) == 1


def test_model_in_memory_is_not_taken_for_the_teacher_with_its_name(folders: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders / "model")
    changed = model.model.layers[0].self_attn.q_proj.weight
    changed.set_value(2 * changed)
    adapted = get_peft_model(model, LoRAConfig(r=2))
    config = make_folder_config(
        folders, "out", teacher_model_name_or_path=str(folders / "model"), lr_scheduler_type="constant"
    )
    source = ModelSource.from_config(config.model)
    group, tokenizer = SingleProcess(), load_tokenizer(folders / "model")
    unknown = DistillationObjective(config, adapted, group, tokenizer)
    assert unknown.teacher is not adapted
    assert DistillationObjective(config, adapted, group, tokenizer, source=source).teacher is adapted


def test_teacher_that_is_an_adapter_is_the_merged_model(folders: Path) -> None:
    tuned = run(folders, "adapter", teacher=None, lora=True, max_steps=2)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders / "model"), folders / "adapter")
    write_tiny_model(folders / "merged")
    merged.merge_and_unload().save_pretrained(folders / "merged")
    assert any(np.abs(value).max() > 1e-3 for name, value in weights(tuned.model).items() if "lora_B" in name)
    runs = [run(folders, f"from_{teacher}", teacher=teacher) for teacher in ("adapter", "merged", "model")]
    assert_same_bits(weights(runs[0].model), weights(runs[1].model))
    assert runs[0].metrics["train_loss"] != runs[2].metrics["train_loss"]


def test_stored_log_probabilities_of_another_adapter_are_refused(folders: Path) -> None:
    run(folders, "adapter", teacher=None, lora=True, max_steps=2)
    keys = {"teacher": "adapter", "teacher_logps_path": str(folders / "logps"), "max_steps": 1}
    run(folders, "first", **keys)
    run(folders, "second", **keys)
    run(folders, "adapter", teacher=None, lora=True, max_steps=1, overwrite_output_dir=True)
    with pytest.raises(ValueError, match="hash of the teacher's files"):
        run(folders, "third", **keys)


def test_adapter_that_cannot_be_a_teacher_is_refused(folders: Path) -> None:
    run(folders, "adapter", teacher=None, lora=True, max_steps=1)
    with pytest.raises(ValueError, match="leave out teacher_weight_quantize_algo"):
        run(folders, "out", teacher="adapter", teacher_weight_quantize_algo="nf4")
    file = folders / "adapter" / "adapter_config.json"
    fields = json.loads(file.read_text())
    for base, message in (
        (str(folders / "moved"), "names its base model as '.*moved'"),
        (None, "does not name its base"),
    ):
        file.write_text(json.dumps({**fields, "base_model_name_or_path": base}))
        with pytest.raises(ValueError, match=f"teacher_model_name_or_path: .*{message}"):
            run(folders, "out", teacher="adapter")
    (folders / "adapter" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has a model and an adapter"):
        run(folders, "out", teacher="adapter")


# -- refused combinations ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lazy": True, "teacher_logps_path": "logps"}, "the rows of a stream are not numbered"),
        ({"lmbda": 0.5, "teacher_logps_path": "logps"}, "leave out teacher_logps_path"),
        ({"lmbda": 0.5, "zero_padding": True}, "set zero_padding: false"),
        ({"lmbda": 0.5, "pad_to_max_length": True}, "set pad_to_max_length: false"),
        ({"lmbda": 0.5, "autoregressive": True}, "plain text has no prompts"),
        ({"lmbda": 0.5, "use_pose_convert": True}, "consecutive position ids"),
        ({"use_pose_convert": True, "teacher_logps_path": "logps"}, "position ids of a row change"),
        ({"sharding": "stage3"}, "distillation compares full logits"),
    ],
)
def test_distillation_refuses_combinations_by_name(folders: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(folders, "out", **keys)


@pytest.mark.parametrize("keys", [{}, {"lazy": True}], ids=["stored", "lazy"])
def test_run_with_sampled_answers_reports_them(folders: Path, keys: dict[str, Any]) -> None:
    sampled = {"lmbda": 0.5, "max_new_tokens": 4, "temperature": 0.9, "max_steps": 8, "do_eval": True}
    result = run(folders, "out", **sampled, **keys)
    lines = [json.loads(line) for line in (folders / "out" / "history.jsonl").read_text().splitlines()]
    lengths = [line.get("completions/mean_length") for line in lines if "loss" in line]
    assert len(lengths) == 8 and any(lengths) and not all(lengths)
    assert all(1 <= length <= 4 for length in lengths if length)
    assert np.isfinite(result.metrics["eval_divergence"])


def test_keys_of_sampled_answers_have_an_effect_without_generated_evaluations() -> None:
    keys = {"--model_name_or_path": "m", "--dataset_name_or_path": "d", "--output_dir": "o", "--do_train": "true"}
    keys |= {"--max_new_tokens": "4", "--temperature": "0.9", "--teacher_model_name_or_path": "t"}
    notes = [
        load_run_config([word for pair in {**keys, **more}.items() for word in pair], peft_methods()).notes
        for more in ({}, {"--lmbda": "0.5"})
    ]
    assert [len([note for note in each if "has no effect" in note]) for each in notes] == [2, 0]


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
