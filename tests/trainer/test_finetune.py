"""Function `finetune`, and other calls that make a run from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

import paddlenlp_ext
from paddlenlp_ext.config import ConfigError


def keys_of(folder: Path, **more: Any) -> dict[str, Any]:
    keys = {
        "model_name_or_path": folder / "model",
        "dataset_name_or_path": folder / "data",
        "output_dir": folder / "out",
        "do_train": True,
        "do_eval": True,
        "lora": True,
        "lora_rank": 2,
        "max_steps": 2,
        "max_length": 64,
        "src_length": 32,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "device": "cpu",
        "disable_tqdm": True,
    }
    return {**keys, **more}


def test_finetune_returns_what_the_run_left(run_folders: Path):
    result = paddlenlp_ext.finetune(keys_of(run_folders))
    assert result.output_dir == run_folders / "out"
    train, evaluation = (
        json.loads((result.output_dir / f"{name}_results.json").read_text()) for name in ("train", "eval")
    )
    assert {**train, **evaluation}.items() <= result.metrics.items()
    assert result.metrics["train_loss"] > 0 and result.metrics["eval_loss"] > 0
    loaded = paddlenlp_ext.AutoPeftModelForCausalLM.from_pretrained(result.output_dir)
    ids = paddle.to_tensor([[5, 10, 4]])
    result.model.eval()
    np.testing.assert_array_equal(loaded(ids).numpy(), result.model(ids).numpy())


def test_finetune_with_do_predict_evaluates_the_test_rows_after_training(run_folders: Path):
    rows = (run_folders / "data" / "dev.json").read_text().splitlines(keepends=True)
    (run_folders / "data" / "test.json").write_text("".join(rows[:5]))
    generation = {"eval_with_do_generation": True, "save_generation_output": True, "max_new_tokens": 4}
    result = paddlenlp_ext.finetune(keys_of(run_folders, do_predict=True, **generation))
    stored = json.loads((result.output_dir / "test_results.json").read_text())
    assert stored.items() <= result.metrics.items() and stored["test_num_rows"] == 5
    answers = [json.loads(line) for line in (result.output_dir / "generated_output_test.json").read_text().splitlines()]
    assert [row["src"] for row in answers] == [json.loads(row)["src"] for row in rows[:5]]
    again = keys_of(
        run_folders,
        do_train=False,
        eval_dataset_path=run_folders / "data" / "test.json",
        output_dir=run_folders / "again",
        lora_path=result.output_dir,
        **generation,
    )
    evaluated = paddlenlp_ext.finetune(again).metrics
    for name in ("loss", "accuracy", "rouge1", "bleu4"):
        assert stored[f"test_{name}"] == evaluated[f"eval_{name}"], name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"no 'test' split; the dataset has none; add one of .*test\.json, .* or set do_predict to false"),
        ({"dataset_name_or_path": "train.json", "do_eval": False}, "do_predict: needs test rows, and .* use a folder"),
        ({"dataset_name_or_path": "inflection"}, "do_predict: inflection has no test rows"),
    ],
)
def test_finetune_with_do_predict_without_test_rows_raises_before_training(run_folders: Path, keys: dict, message: str):
    if keys.get("dataset_name_or_path") == "train.json":
        keys = {**keys, "dataset_name_or_path": run_folders / "data" / "train.json"}
    with pytest.raises(ValueError, match=message):
        paddlenlp_ext.finetune(keys_of(run_folders, do_predict=True, **keys))
    assert not list((run_folders / "out").glob("*results.json"))


def test_finetune_with_do_predict_and_rows_in_memory_names_the_argument_for_test_rows(run_folders: Path):
    keys = keys_of(run_folders, do_predict=True, do_eval=False)
    with pytest.raises(ValueError, match=r'pass test rows as a dev set, eval_dataset=\{"test": rows\}'):
        paddlenlp_ext.finetune(keys, [{"src": "a", "tgt": "b"}])


def test_finetune_reads_a_file_and_overrides_it(run_folders: Path, tmp_path: Path):
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in keys_of(run_folders).items()}
    (tmp_path / "run.json").write_text(json.dumps(plain))
    result = paddlenlp_ext.finetune(tmp_path / "run.json", do_eval=False, max_steps=1, lora_rank=3)
    assert result.trainer.state.step == 1 and result.model.peft_config.rank == 3
    assert not (result.output_dir / "eval_results.json").exists()


@pytest.mark.parametrize("lora", [True, False])
def test_finetune_with_a_strategy_and_pose_saves_its_positions(run_folders: Path, lora: bool):
    strategy = {"use_long_sequence_strategies": True, "strategy_name": "yarn", "rope_scaling_factor": 4}
    keys = keys_of(run_folders, lora=lora, use_pose_convert=True, do_eval=False, **strategy)
    result = paddlenlp_ext.finetune(keys if lora else {key: keys[key] for key in keys if key != "lora_rank"})
    saved = json.loads((result.output_dir / ("adapter_config.json" if lora else "config.json")).read_text())
    saved = saved["base_config_overrides"] if lora else saved
    trained = json.loads((run_folders / "model" / "config.json").read_text())["max_position_embeddings"]
    assert saved["max_position_embeddings"] == 4 * trained
    assert saved["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": trained,
    }


def test_dpo_trains_on_pairs_and_returns_what_the_run_left(run_folders: Path):
    rows = [{"prompt": "red fig =", "chosen": "fig red", "rejected": "plum"}, *3 * [{"src": "a"}]]
    (run_folders / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = keys_of(run_folders, bad_rows="drop", max_lost_targets=1, max_steps=2)
    keys["dataset_name_or_path"] = None
    paths = dict.fromkeys(("train_dataset_path", "dev_dataset_path"), run_folders / "pairs.jsonl")
    result = paddlenlp_ext.dpo(keys, **paths, loss_type="hinge", sft_loss_ratio=0.5)
    assert result.metrics["eval_rewards/margins"] > 0 and (result.output_dir / "adapter_model.safetensors").is_file()
    assert result.trainer.config.preference.loss_type == "hinge"


ROWS = [{"src": f"red {fruit} =", "tgt": f"{fruit} red"} for fruit in ("fig", "lime", "plum", "pear")]
PAIRS = [{"prompt": row["src"], "chosen": row["tgt"], "rejected": "apple"} for row in ROWS]


class Columns(list):
    """Stand-in for `datasets.Dataset`, which the tests do not need."""

    column_names = ("src", "tgt")


@pytest.mark.parametrize("kind", [list, Columns])
def test_finetune_on_rows_in_memory_is_that_on_their_files(run_folders: Path, kind: type):
    for split in ("train", "dev"):
        (run_folders / f"{split}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    files = {"dataset_name_or_path": run_folders / "train.jsonl", "eval_dataset_path": run_folders / "dev.jsonl"}
    keys = keys_of(run_folders, overwrite_output_dir=True, audit=True, **files)
    expected = paddlenlp_ext.finetune(keys).metrics
    nowhere = {**keys, "dataset_name_or_path": "nowhere", "eval_dataset_path": None, "do_train": None, "do_eval": None}
    found = paddlenlp_ext.finetune(nowhere, kind(ROWS), kind(ROWS)).metrics
    assert {name: found[name] for name in ("train_loss", "eval_loss")} == {
        name: expected[name] for name in ("train_loss", "eval_loss")
    }
    named = paddlenlp_ext.finetune(nowhere, kind(ROWS), {"a": kind(ROWS[:2]), "b": kind(ROWS)}).metrics
    assert named["eval_b_loss"] == expected["eval_loss"] != named["eval_a_loss"]
    paths = paddlenlp_ext.finetune(nowhere, run_folders / "train.jsonl", eval_dataset=run_folders / "dev.jsonl").metrics
    assert paths["eval_loss"] == expected["eval_loss"]
    listed = paddlenlp_ext.finetune(keys, eval_dataset={"a": run_folders / "dev.jsonl"}).metrics
    assert listed["eval_a_loss"] == expected["eval_loss"]
    with pytest.raises(ValueError, match="eval_dataset: some dev sets are paths, others are rows in memory"):
        paddlenlp_ext.finetune(keys, eval_dataset={"a": run_folders / "dev.jsonl", "b": ROWS})


@pytest.mark.parametrize("function", ["dpo", "train_reward_model"])
def test_preference_functions_train_on_rows_in_memory(run_folders: Path, function: str):
    keys = keys_of(run_folders, dataset_name_or_path=None, train_dataset_path="nowhere", audit=True)
    result = getattr(paddlenlp_ext, function)(keys, train_dataset=PAIRS, eval_dataset=PAIRS)
    assert result.metrics["train_loss"] > 0 and "eval_loss" in result.metrics


def test_finetune_errors_name_the_keys(run_folders: Path):
    with pytest.raises(ConfigError) as error:
        paddlenlp_ext.finetune(keys_of(run_folders, lora_rank=0, learnign_rate=1.0), max_steps="two")
    message = str(error.value)
    for part in ("config: lora_rank", "did you mean 'learning_rate'", "overrides: max_steps"):
        assert part in message
    assert not (run_folders / "out").exists()


def test_trainer_runs_on_datasets_loaded_in_python(run_folders: Path):
    config = paddlenlp_ext.load_config(keys_of(run_folders, max_steps=1))
    tokenizer = paddlenlp_ext.AutoTokenizer.from_pretrained(run_folders / "model")
    rows = {
        split: paddlenlp_ext.load_dataset(run_folders / "data", split, tokenizer, max_length=64, src_length=32)
        for split in ("train", "dev")
    }
    model = paddlenlp_ext.AutoModelForCausalLM.from_pretrained(run_folders / "model")
    model = paddlenlp_ext.get_peft_model(model, paddlenlp_ext.LoRAConfig(r=2))
    trainer = paddlenlp_ext.Trainer(model, config, rows["train"], rows["dev"], tokenizer)
    assert trainer.train()["step"] == 1
    assert trainer.evaluate()["eval_num_rows"] == len(rows["dev"])


def test_merge_adapter_writes_the_model_that_was_trained(run_folders: Path):
    result = paddlenlp_ext.finetune(keys_of(run_folders, do_eval=False))
    report = paddlenlp_ext.merge_adapter(result.output_dir, run_folders / "merged")
    assert report.num_merged == 14
    merged = paddlenlp_ext.AutoModelForCausalLM.from_pretrained(run_folders / "merged")
    ids = paddle.to_tensor([[5, 10, 4]])
    result.model.eval()
    np.testing.assert_allclose(merged(ids).numpy(), result.model(ids).numpy(), rtol=0, atol=1e-4)


def test_auto_peft_model_without_a_named_base_says_what_to_do(run_folders: Path):
    result = paddlenlp_ext.finetune(keys_of(run_folders, do_eval=False, max_steps=1))
    file = result.output_dir / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"does not name its base model; .*PeftModel.from_pretrained"):
        paddlenlp_ext.AutoPeftModelForCausalLM.from_pretrained(result.output_dir)


def test_finetune_failing_before_the_first_step_leaves_a_report_and_can_start_again(run_folders: Path):
    rows = run_folders / "data" / "train.json"
    good = rows.read_text()
    rows.write_text('{"src": 1}\n')
    with pytest.raises(ValueError, match=r"train\.json:1"):
        paddlenlp_ext.finetune(keys_of(run_folders))
    page = (run_folders / "out" / "report.html").read_text()
    assert "Failed before the first step: " in page and "train.json:1" in page and "lora_rank" in page
    assert "resume_from_checkpoint true" not in page
    rows.write_text(good)
    paddlenlp_ext.finetune(keys_of(run_folders))
    assert "Completed: 2 steps" in (run_folders / "out" / "report.html").read_text()
    rows.write_text('{"src": 1}\n')
    with pytest.raises(ValueError, match=r"train\.json:1"):
        paddlenlp_ext.finetune(keys_of(run_folders, overwrite_output_dir=True))
    page = (run_folders / "out" / "report.html").read_text()
    assert "Completed: 2 steps" in page, "the report of the earlier run is preserved"
