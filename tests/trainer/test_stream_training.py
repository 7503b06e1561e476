"""Training on a stream (`lazy`), from files: stopped and resumed, with the bits of an uninterrupted run."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from rich.console import Console

from paddlenlp_ext.cli.dry_run import describe_run
from paddlenlp_ext.data.preview import preview_rows
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.trainer.trainer_state import TrainerState
from tests.common.training import KillAfter, KilledError, assert_same_bits, make_config, weights


def stream_config(run_folders, output_dir, **keys):
    return make_config(
        run_folders / output_dir,
        model_name_or_path=str(run_folders / "model"),
        dataset_name_or_path=str(run_folders / "data"),
        data_cache_dir=str(run_folders / "cache"),
        chat_template="none",
        device="cpu",
        lazy=True,
        shuffle_buffer_size=20,
        per_device_train_batch_size=2,
        max_steps=9,
        **keys,
    )


def make_trainer(run_folders, output_dir, callbacks=(), **keys):
    config = stream_config(run_folders, output_dir, **keys)
    return build_trainer(config, load_data(config), callbacks)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_trainer_on_a_stream_resumes_with_the_same_bits(run_folders, num_workers):
    straight = make_trainer(run_folders, "straight")
    straight.train()
    assert straight.state.epoch > 1 and straight.state.step == 9
    saves = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KilledError):
        make_trainer(run_folders, "run", [KillAfter(5)], dataloader_num_workers=num_workers, **saves).train()
    stopped = json.loads((run_folders / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert stopped["window_index"] == 4, "the checkpoint must be in the middle of an epoch"
    resumed = make_trainer(run_folders, "run", resume_from_checkpoint=True, **saves)
    resumed.train()
    assert_same_bits(weights(resumed.model), weights(straight.model))
    assert resumed.state.data_cursor == straight.state.data_cursor
    assert resumed.state.num_tokens == straight.state.num_tokens


def test_trainer_on_a_stream_rolls_back_to_the_bits_of_a_run_without_the_step(run_folders):
    saves = {"save_strategy": "steps", "save_steps": 4}
    chosen = make_trainer(run_folders, "chosen", skip_data_intervals=[[6, 6]], **saves)
    chosen.train()
    run = make_trainer(run_folders, "run", nan_policy="rollback", **saves)
    norm, calls = run.process_group.norm, itertools.count(1)
    run.process_group.norm = lambda parameters: norm(parameters) * (math.nan if next(calls) == 6 else 1.0)
    run.train()
    assert run.state.skipped_steps == [6]
    assert_same_bits(weights(run.model), weights(chosen.model))


def test_trainer_state_of_a_stream_is_json_and_older_states_have_no_cursor():
    state = TrainerState(data_cursor={"window": {"places": [{"at": [3, 4]}]}, "pack": 2})
    stored = json.loads(json.dumps(state.to_dict()))
    assert TrainerState.from_dict(stored) == state
    del stored["data_cursor"]
    assert TrainerState.from_dict(stored).data_cursor is None


def test_describe_run_and_preview_of_a_stream_read_its_first_rows(run_folders):
    config = stream_config(run_folders, "out")
    data = load_data(config)
    console = Console(record=True, width=120)
    describe_run(config, data, console)
    preview_rows(data.any_rows, data.tokenizer, 2, console)
    text = console.export_text()
    assert "a stream (lazy): rows are not counted" in text and "9 (max_steps)" in text and "total" in text
    assert "train.json:1 " in text and "train.json:2 " in text and "train.json:3 " not in text
