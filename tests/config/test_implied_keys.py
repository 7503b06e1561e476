"""Harmless combinations that PaddleNLP accepts: values are adjusted as there, each with one note."""

from __future__ import annotations

import pytest

from tests.config.config_cases import SMALLEST, load, problems, write

# settings -> values of the run, beginning of the only note
ADJUSTED = [
    (
        {"evaluation_strategy": "epoch", "do_eval": False},
        {"do_eval": True},
        "do_eval is on, because evaluation_strategy is epoch; set evaluation_strategy: no to switch it off",
    ),
    ({"evaluation_strategy": "epoch"}, {"do_eval": True}, "do_eval is on"),
    ({"dev_ratio": 0.1}, {"do_eval": True}, "do_eval is on, because dev_ratio holds out eval rows"),
    ({"eval_on_start": True}, {"do_eval": True}, "do_eval is on, because eval_on_start is true"),
    (
        {"load_best_model_at_end": True},
        {"load_best_model_at_end": False},
        "load_best_model_at_end has no effect: evaluation_strategy is no",
    ),
    (
        {"load_best_model_at_end": True, "save_strategy": "epoch"},
        {"load_best_model_at_end": False, "save_strategy": "epoch"},
        "load_best_model_at_end has no effect",
    ),
    (
        {"flash_mask": True},
        {"zero_padding": True, "use_flash_attention": True},
        "zero_padding and use_flash_attention are on, because flash_mask is true",
    ),
    (
        {"flash_mask": True, "zero_padding": True},
        {"use_flash_attention": True},
        "use_flash_attention is on, because flash_mask",
    ),
    (
        {"use_gradient_checkpointing": True},
        {"recompute": True, "offload_recompute_inputs": False},
        "use_gradient_checkpointing True sets recompute",
    ),
    (
        {"use_gradient_checkpointing": "unsloth"},
        {"recompute": True, "offload_recompute_inputs": True},
        "use_gradient_checkpointing unsloth sets recompute and offload_recompute_inputs",
    ),
    ({"max_steps": 0}, {"max_steps": -1}, "max_steps: 0 has no effect: num_train_epochs sets the length"),
    (
        {"tensor_parallel_degree": 8},
        {"tensor_parallel_degree": 1},
        "tensor_parallel_degree 8 is set to 1, because there is one process; to start several, run python -m "
        "paddle.distributed.launch --nproc_per_node 8",
    ),
    (
        {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 4},
        {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1},
        "tensor_parallel_degree 2 and pipeline_parallel_degree 4 are set to 1",
    ),
    ({"sep_parallel_degree": 2}, {"sep_parallel_degree": 1}, "sep_parallel_degree 2 is set to 1"),
    ({"offload_optim": True}, {"offload_optim": False}, "offload_optim has no effect: on the CPU"),
    ({"expert_parallel_degree": 2}, {"expert_parallel_degree": 1}, "expert_parallel_degree 2 is set to 1"),
]


@pytest.mark.parametrize(("values", "adjusted", "note"), ADJUSTED, ids=lambda value: " ".join(value)[:40])
def test_adjustment_is_made_with_one_note(tmp_path, values, adjusted, note):
    config = load(write(tmp_path, SMALLEST | {"device": "cpu"} | values))
    flat = config.to_flat_dict()
    assert {key: flat[key] for key in adjusted} == adjusted
    (found,) = config.notes
    assert found.startswith(note) and found.endswith("run.json:7)"), found
    again = load(write(tmp_path, flat, "again.json")).to_flat_dict()
    assert again == flat, "the written configuration needs no adjustment"


@pytest.mark.parametrize("values", [values for values, _, _ in ADJUSTED], ids=" ".join)
def test_adjustment_of_an_invalid_key_adds_no_problem(tmp_path, values):
    first = next(iter(values))
    (found,) = problems(write(tmp_path, SMALLEST | values | {first: [1]}))
    assert found.key == first


def test_degrees_of_several_processes_stay_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    path = write(tmp_path, SMALLEST | {"tensor_parallel_degree": 8})
    (found,) = problems(path)
    assert "need 8 processes, but 2 were started" in found.message
    assert load(path, "--tensor_parallel_degree", "2").parallel.tensor_parallel_degree == 2


def test_sharding_offload_on_the_cpu_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    config = load(write(tmp_path, SMALLEST | {"sharding": "stage2 offload", "device": "cpu"}))
    assert config.parallel.sharding == "stage2"
    (note,) = config.notes
    assert note.startswith("sharding offload has no effect: on the CPU")
    (found,) = problems(write(tmp_path, SMALLEST | {"sharding": "offload", "device": "cpu"}))
    assert "names no stages" in found.message and found.key == "sharding"
