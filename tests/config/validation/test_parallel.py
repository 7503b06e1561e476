"""Rules of the parallel layout: degrees that do not fit the processes, and PaddleNLP's flags."""

from __future__ import annotations

import pytest

from paddlenlp_ext import devices
from paddlenlp_ext.config.paddlenlp_flags import COMPAT_FLAGS
from paddlenlp_ext.peft.registry import peft_methods
from tests.config.config_cases import SMALLEST, load, problems, write


@pytest.mark.parametrize(
    ("processes", "values", "words"),
    [
        (2, {"tensor_parallel_degree": 4}, "degree 4 need 4 processes, but 2 were started (python -m paddle.dist"),
        (4, {"tensor_parallel_degree": 3}, "nearest valid degrees: tensor_parallel_degree 4"),
        (6, {"sharding": "stage1", "sharding_parallel_degree": 4}, "nearest valid degrees: tensor_parallel_degree 1"),
        (2, {"tensor_parallel_degree": 2, "optim": "adamw_8bit"}, "optim: adamw_8bit needs unsharded parameters"),
        (
            2,
            {"expert_parallel_degree": 2, "optim": "adamw_mini"},
            "but expert_parallel_degree: 2 shards the parameters; use optim: adamw",
        ),
        (
            8,
            {"expert_parallel_degree": 3, "tensor_parallel_degree": 2},
            "expert_parallel_degree 3 does not divide the 4",
        ),
    ],
)
def test_layout_rule_with_unfitting_degrees_names_the_nearest(tmp_path, monkeypatch, processes, values, words):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(processes))
    (found,) = problems(write(tmp_path, SMALLEST | values))
    assert words in found.message


@pytest.mark.parametrize(
    ("processes", "values", "words"),
    [
        (4, {"lora": True, "use_mora": True}, "tensor_parallel_degree 1, pipeline_parallel_degree 2"),
        (2, {"lora": True, "use_mora": True, "pipeline_parallel_degree": 1}, "and 2 for data parallelism"),
        (4, {"reft": True, "sequence_parallel": True}, "set sequence_parallel: false"),
    ],
)
def test_layout_rule_with_an_excluded_method_is_refused(tmp_path, monkeypatch, processes, values, words):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(processes))
    layout = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2} | values
    (found,) = problems(write(tmp_path, SMALLEST | layout), methods=peft_methods())
    assert words in found.message and "cannot be combined with" in found.message
    load(write(tmp_path, SMALLEST | layout | {"tensor_parallel_degree": 1}), methods=peft_methods())


def test_compat_flags_are_noted_or_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
    on = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sharding": "stage1"}
    for key, flags in COMPAT_FLAGS.items():
        for word in flags.words:
            path = write(tmp_path, SMALLEST | on | {key: word})
            if word in flags.unavailable:
                (found,) = problems(path)
                assert found.key == key and f"{word} is not available: " in found.message
            else:
                (note,) = [note for note in load(path).notes if note.startswith(key)]
                words = "is always on" if word in flags.always else "does not change the results"
                assert f"{key}: {word} {words}" in note


def test_compat_flags_without_their_parallelism_are_noted_once(tmp_path):
    keys = {
        "pipeline_parallel_config": "disable_p2p_cache_shape enable_timer",
        "sharding_parallel_config": "split_param",
    }
    notes = load(write(tmp_path, SMALLEST | keys)).notes
    assert [note.split(" (")[0] for note in notes] == [
        "pipeline_parallel_config has no effect: there is no pipeline",
        "sharding_parallel_config has no effect: there is no sharding",
    ]


@pytest.mark.parametrize(("degree", "num_notes"), [(-1, 0), (1, 0), (2, 1)])
def test_sharding_degree_without_sharding_is_noted(tmp_path, monkeypatch, degree, num_notes):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    notes = load(write(tmp_path, SMALLEST | {"sharding_parallel_degree": degree})).notes
    assert (
        sum(note.startswith("sharding_parallel_degree has no effect: sharding is off") for note in notes) == num_notes
    )


@pytest.mark.parametrize("keys", [{"tensor_parallel_degree": 2}, {"sharding_parallel_degree": 1}])
def test_sharding_without_free_processes_is_noted(tmp_path, monkeypatch, keys):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    words = "sharding stage3 has no effect: the degrees are tensor_parallel_degree"
    assert any(note.startswith(words) for note in load(write(tmp_path, SMALLEST | keys | {"sharding": "stage3"})).notes)
    assert not any(note.startswith(words) for note in load(write(tmp_path, SMALLEST | {"sharding": "stage3"})).notes)


def test_muon_is_accepted_with_tensor_parallelism(tmp_path, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    config = load(write(tmp_path, SMALLEST | {"tensor_parallel_degree": 2, "optim": "muon"}))
    assert (config.optim.optim, config.notes) == ("muon", [])


def test_sharding_offload_on_gpus_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    config = load(write(tmp_path, SMALLEST | {"sharding": "stage2 offload", "offload_optim": True, "device": "gpu"}))
    assert config.parallel.sharding == "stage2 offload" and config.optim.offload_optim and config.notes == []


def test_compat_flag_that_is_not_available_is_refused_only_with_its_parallelism(tmp_path, monkeypatch):
    path = write(tmp_path, SMALLEST | {"pipeline_parallel_config": "use_dualpipev", "pipeline_parallel_degree": 2})
    assert any("pipeline_parallel_config has no effect" in note for note in load(path).notes)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    (found,) = problems(path)
    assert "use_dualpipev is not available" in found.message
