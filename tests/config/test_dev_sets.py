"""Names and paths of dev sets, and the metric of one of them that selects the best evaluation."""

from __future__ import annotations

import pytest

from paddlenlp_ext.config.dev_sets import best_metric, dev_sets
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from tests.config.config_cases import SMALLEST, load, problems, write

TWO = {"eval_dataset_path": {"math": "a.jsonl", "math_hard": "b.jsonl"}, "do_eval": True}


@pytest.mark.parametrize(
    ("written", "sets"),
    [
        (None, {"": "data"}),
        ("more/math.jsonl", {"": "more/math.jsonl"}),
        (["more/math.jsonl", "code"], {"math": "more/math.jsonl", "code": "code"}),
        ("more/math.jsonl, code", {"math": "more/math.jsonl", "code": "code"}),
        ({"math": "x.json"}, {"math": "x.json"}),
    ],
)
def test_dev_sets_are_named_by_the_object_or_their_files(tmp_path, written, sets):
    data = load(write(tmp_path, SMALLEST | {"do_eval": True, "eval_dataset_path": written})).data
    assert dev_sets(data) == sets
    assert dev_sets(DataConfig(dataset_name_or_path="data", eval_dataset_path=written)) == sets


@pytest.mark.parametrize(
    ("words", "sets"),
    [("a.jsonl,b.jsonl", {"a": "a.jsonl", "b": "b.jsonl"}), ('{"x": "a", "y": "b"}', {"x": "a", "y": "b"})],
)
def test_dev_sets_on_the_command_line_are_a_list_or_an_object(tmp_path, words, sets):
    assert dev_sets(load(write(tmp_path, SMALLEST), "--do_eval", "true", "--eval_dataset", words).data) == sets


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (["a/dev.json", "b/dev.json"], "two dev sets are named 'dev'; write an object"),
        ({"math": None}, "math has no path"),
        ("a.json,", "a dev set has no path"),
        ({"a b": "x"}, "'a b' is not a valid name"),
        ({}, "is empty"),
    ],
)
def test_dev_sets_that_cannot_be_named_are_an_error(tmp_path, written, words):
    (found,) = problems(write(tmp_path, SMALLEST | {"do_eval": True, "eval_dataset_path": written}))
    assert words in found.message and found.key == "eval_dataset_path"


@pytest.mark.parametrize(
    ("written", "name", "greater"),
    [
        (None, "math_loss", False),
        ("accuracy", "math_accuracy", True),
        ("eval_math_hard_ppl", "math_hard_perplexity", False),
        ("math_accuracy", "math_accuracy", True),
    ],
)
def test_best_metric_without_a_dev_set_is_that_of_the_first(tmp_path, written, name, greater):
    train = load(write(tmp_path, SMALLEST | TWO | {"metric_for_best_model": written})).train
    assert (train.metric_for_best_model, train.greater_is_better) == (name, greater)


@pytest.mark.parametrize(("written", "names", "name"), [("f1_macro", ("f1",), "f1_f1_macro"), ("own", ("",), "own")])
def test_best_metric_name_of_a_metric_wins_over_a_dev_set(written, names, name):
    assert best_metric(TrainConfig(metric_for_best_model=written), names).name == name


def test_best_metric_that_no_evaluation_computes_is_an_error(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | TWO | {"metric_for_best_model": "code_loss"}))
    assert "'code_loss' is not a metric" in found.message
    (found,) = problems(write(tmp_path, SMALLEST | {"metric_for_best_model": "accuracyy"}))
    assert "did you mean 'accuracy'?" in found.message
    own = {"metric_for_best_model": "length", "compute_metrics": "a.b", "eval_with_do_generation": True}
    assert load(write(tmp_path, SMALLEST | own)).train.greater_is_better is True


def test_eval_dataset_path_alone_is_enough_to_evaluate(tmp_path):
    evaluation = {"do_train": None, "do_eval": True, "dataset_name_or_path": None}
    assert load(write(tmp_path, SMALLEST | evaluation | {"eval_dataset_path": "dev.json"})).train.do_eval
    (found,) = problems(write(tmp_path, SMALLEST | {"dataset_name_or_path": None, "eval_dataset_path": "dev.json"}))
    assert "do_train needs dataset_name_or_path" in found.message
