"""Arguments of merge_tp_and_pp_params.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from paddlenlp_ext.cli.merge_tp_and_pp_params import merge_shards
from paddlenlp_ext.config.errors import ConfigError
from paddlenlp_ext.parallel import merge_paddlenlp_shards as module


def test_merge_shards_short_and_long_names_pass_the_same_arguments(monkeypatch):
    calls = []
    report = SimpleNamespace(output="out", num_tensors=5, num_joined=3)
    monkeypatch.setattr(module, "merge_saved_shards", lambda *arguments: calls.append(arguments) or report)
    short = ["--model_name_or_path", "model", "--tp", "2", "--pp", "3", "--allow_pickle"]
    assert merge_shards(short) == "out: 5 tensors, 3 of them joined from shards"
    degrees = ["--tensor_parallel_degree", "2", "--pipeline_parallel_degree", "3", "--device", "gpu"]
    degrees += ["--output_path", "merged", "--overwrite", "true"]
    merge_shards(["--model_name_or_path", "model", *degrees, "--allow_pickle"])
    assert calls == [(Path("model"), 2, 3, None, False), (Path("model"), 2, 3, Path("merged"), True)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--tensor_parallel_degree is required"),
        (["--tp", "2", "--pp", "-1"], "-1 is out of range; allowed: at least 0"),
        (["--tp", "2", "--pp", "1", "--overwritten"], "unknown key 'overwritten'"),
    ],
)
def test_merge_shards_invalid_arguments_raise(words, message):
    with pytest.raises(ConfigError, match=message):
        merge_shards(["--model_name_or_path", "model", *words])


def test_merge_shards_without_allow_pickle_raises():
    with pytest.raises(ValueError, match="add --allow_pickle"):
        merge_shards(["--model_name_or_path", "model", "--tp", "2", "--pp", "1"])
