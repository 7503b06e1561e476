"""Rules between keys: contradictions are errors that name both keys; keys without effect are notes."""

from __future__ import annotations

import functools

import pytest

from paddlenlp_ext.config.errors import ConfigError
from paddlenlp_ext.config.recompute_options import parse_layers, parse_refined
from paddlenlp_ext.config.validation import check_trainer_config, training
from tests.common.training import make_config
from tests.config.config_cases import SMALLEST, load, problems, write

EVALUATED = {"evaluation_strategy": "epoch"}
# settings -> words of the single problem, which is located at the line of the first key
CONTRADICTIONS = [
    (
        {"offload_recompute_inputs": True, "recompute": True, "recompute_granularity": "full_attn"},
        "offload_recompute_inputs needs recompute_granularity: full",
    ),
    ({"eval_with_do_generation": True, "autoregressive": True}, "rows are plain text"),
    ({"dev_ratio": 0.1, "eval_dataset_path": "dev.jsonl"}, "both select eval rows; keep one"),
    ({"min_learning_rate": 1.0}, "min_learning_rate 1 is above learning_rate"),
    ({"lr_end": 1.0, "lr_scheduler_type": "polynomial"}, "lr_end 1 is above learning_rate"),
    (
        {"save_strategy": "epoch", "evaluation_strategy": "steps", "load_best_model_at_end": True},
        "evaluation_strategy (steps) and save_strategy (epoch)",
    ),
    (
        {
            "save_steps": 10,
            "eval_steps": 4,
            "evaluation_strategy": "steps",
            "save_strategy": "steps",
            "load_best_model_at_end": True,
        },
        "save_steps 10 is not a multiple of eval_steps 4",
    ),
    ({"metric_for_best_model": "rougel", **EVALUATED}, "needs eval_with_do_generation"),
    ({"metric_for_best_model": "eval_bleu4", **EVALUATED}, "needs eval_with_do_generation"),
    ({"metric_for_best_model": "f1_macro", "eval_with_do_generation": True, **EVALUATED}, "and eval_labels: true"),
    ({"metric_for_best_model": "f1_macro", "eval_labels": True, **EVALUATED}, "needs eval_with_do_generation: true"),
    ({"fp16": True, "bf16": True}, "bf16 and fp16 are both true"),
    ({"fp16_opt_level": "O2"}, "O2 needs bf16: true or fp16: true"),
    ({"device": "npu"}, "this Paddle has: cpu"),
    ({"do_train": False}, "nothing to do"),
    ({"model_name_or_path": None}, "do_train needs model_name_or_path"),
    ({"dataset_name_or_path": None}, "do_train needs dataset_name_or_path"),
    ({"output_dir": ""}, "do_train needs output_dir"),
    ({"dataset_name_or_path": None, "do_train": None, "do_eval": True}, "do_eval needs dataset_name_or_path"),
    ({"resume_from_checkpoint": True, "do_train": False, "do_eval": True}, "resume_from_checkpoint needs do_train"),
    ({"push_to_hub": True, "do_train": False, "do_eval": True}, "push_to_hub needs do_train"),
    ({"do_train": None, "dataset_name_or_path": None, "do_predict": True}, "do_predict needs dataset_name_or_path"),
    ({"use_gradient_checkpointing": "yes"}, "'yes' is not true, false or unsloth"),
    ({"refined_recompute": "mlp_ln:5", "recompute": True}, "unknown region 'mlp_ln'"),
    (
        {"early_stopping_patience": 3},
        "early_stopping_patience needs evaluation_strategy: steps or epoch",
    ),
    ({"early_stopping": True}, "early_stopping needs evaluation_strategy"),
    ({"metric_for_best_model": "losss", **EVALUATED}, "did you mean 'loss'?"),
    ({"eval_dataset_path": ["a/x.json", "b/x.json"], **EVALUATED}, "two dev sets are named 'x'"),
    (
        {"report_to": "comet"},
        'report_to: "comet" is not one of: none, all, visualdl, tensorboard, wandb, swanlab, mlflow',
    ),
    ({"report_to": "swanlab"}, "swanlab: needs the package swanlab, which is not installed; run: pip install"),
    ({"lazy": True}, "lazy: the number of rows in a stream is unknown"),
    ({"dev_ratio": 1.5}, "dev_ratio: 1.5 is neither a fraction below 1 nor a whole number of rows"),
    ({"dev_ratio": 500, "lazy": True, "max_steps": 9}, "dev_ratio: 500 is a number of rows, but lazy rows"),
]


@pytest.mark.parametrize(("values", "words"), CONTRADICTIONS, ids=lambda value: " ".join(value)[:50])
def test_rules_with_contradicting_keys_name_both(tmp_path, values, words):
    keys = [key for key in SMALLEST | values if (SMALLEST | values)[key] is not None]
    (found,) = problems(write(tmp_path, SMALLEST | values))
    assert words in found.message, found
    first = next(iter(values))
    if (SMALLEST | values)[first] is not None:
        assert found.key == first and found.line == 2 + list(SMALLEST | values).index(first)
    else:
        assert found.line is not None and keys


def test_rules_with_an_invalid_key_add_no_second_problem(tmp_path):
    values = {"zero_padding": "x", "greedy_zero_padding": True, "do_eval": "x", "evaluation_strategy": "steps"}
    assert [problem.key for problem in problems(write(tmp_path, SMALLEST | values))] == ["zero_padding", "do_eval"]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"do_eval": "x", "output_dir": None}, ["do_eval", "output_dir"]),
        ({"model_name_or_path": 3, "output_dir": None}, ["model_name_or_path", "output_dir"]),
        ({"zero_padding": "x", "flash_mask": True, "do_train": False}, ["zero_padding", "do_train"]),
        ({"warmup_ratio": "x", "min_learning_rate": 1.0}, ["warmup_ratio", "min_learning_rate"]),
        ({"lora": "x", "pissa": True, "lora_rank": 4}, ["lora"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_rules_with_an_invalid_key_report_all_others(tmp_path, values, found):
    assert sorted(problem.key for problem in problems(write(tmp_path, SMALLEST | values))) == sorted(found)


@pytest.mark.parametrize(
    "values",
    [
        {"weight_blocksize": 64, "top_p": 1.0, "temperature": 1.0, "save_steps": 500},
        {"top_k": 5, "top_p": 0.5, "eval_with_do_generation": True},
        {"neftune": True, "neftune_noise_alpha": 10.0, "save_strategy": "steps", "save_steps": 5},
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_idle_rules_with_used_or_default_keys_note_nothing(tmp_path, values):
    assert load(write(tmp_path, SMALLEST | values)).notes == []


def test_compat_keys_of_any_type_are_reported_as_not_available(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"use_ssa": True}))
    assert "is not available yet" in found.message
    (note,) = load(write(tmp_path, SMALLEST | {"model_init_kwargs": {"a": 1}})).notes
    assert note.startswith("model_init_kwargs has no effect")


IDLE = [
    ({"use_flash_attention": True}, "use_flash_attention has no effect on the CPU"),
    ({"greedy_zero_padding": True}, "greedy_zero_padding has no effect: zero_padding is false"),
    ({"warmup_steps": 9, "max_steps": 5}, "warmup_steps 9 is more than max_steps 5: the learning rate rises"),
    ({"sharding": "stage2"}, "sharding stage2 has no effect: there is one process"),
    ({"src_length": 512, "max_length": 512}, "leaves no room for an answer"),
    ({"unified_checkpoint": True}, "unified_checkpoint has no effect"),
    ({"eval_accumulation_steps": 16}, "eval_accumulation_steps has no effect"),
    ({"pipeline_parallel_config": "disable_p2p_cache_shape"}, "there is no pipeline"),
    ({"weight_blocksize": 128}, "weight_quantize_algo is off"),
    ({"dataloader_num_workers": 2}, "dataloader_num_workers has no effect: lazy is false"),
    ({"shuffle_buffer_size": 100}, "shuffle_buffer_size has no effect: lazy is false"),
    ({"bf16": True, "fp16_opt_level": "O0"}, "fp16_opt_level O0 computes in float32"),
    ({"top_k": 5}, "top_k has no effect: eval_with_do_generation is false"),
    ({"mask_reasoning": True, "autoregressive": True}, "mask_reasoning has no effect: autoregressive rows are plain"),
    ({"top_p": 0.5}, "top_p has no effect: eval_with_do_generation is false"),
    ({"max_new_tokens": 5}, "max_new_tokens has no effect: eval_with_do_generation is false"),
    ({"temperature": 0.5, "eval_with_do_generation": True}, "temperature has no effect: top_k: 1"),
    ({"eval_steps": 5}, "eval_steps has no effect"),
    ({"metric_for_best_model": "rougel"}, "metric_for_best_model has no effect: evaluation_strategy is no"),
    ({"greater_is_better": True}, "greater_is_better has no effect: evaluation_strategy is no"),
    ({"save_steps": 5, "save_strategy": "epoch"}, "save_steps has no effect"),
    ({"hub_model_id": "org/name"}, "hub_model_id has no effect: push_to_hub is false"),
    ({"neftune_noise_alpha": 10.0}, "neftune_noise_alpha has no effect"),
    ({"evaluation_strategy": "epoch"}, "do_eval is on"),
    ({"save_generation_output": True}, "eval_with_do_generation is false"),
    ({"eval_labels": True}, "eval_with_do_generation is false"),
    ({"compute_metrics": "a.b"}, "compute_metrics has no effect: eval_with_do_generation is false"),
    ({"eval_dataset_path": "dev.json"}, "eval_dataset_path has no effect: do_eval is false"),
    ({"early_stopping": False, "early_stopping_patience": 3}, "early_stopping_patience has no effect"),
    ({"early_stopping_threshold": 0.1}, "early_stopping_threshold has no effect: early_stopping is off"),
    ({"muon_momentum": 0.9}, "muon_momentum has no effect: optim is not muon"),
    ({"num_cycles": 2.0}, "num_cycles has no effect: the learning rate schedule has no cycles"),
    ({"power": 2.0, "lr_scheduler_type": "cosine"}, "power has no effect: lr_scheduler_type is not polynomial"),
    ({"num_decay_steps": 9}, "num_decay_steps has no effect: lr_scheduler_type is not warmup_stable_decay"),
    ({"ssa_group_size_ratio": 0.5}, "ssa_group_size_ratio has no effect: use_ssa is off"),
]


@pytest.mark.parametrize(("values", "words"), IDLE, ids=lambda value: " ".join(value)[:50])
def test_rules_with_an_idle_key_note_it(tmp_path, values, words):
    config = load(write(tmp_path, SMALLEST | {"device": "cpu"} | values))
    notes = [note for note in config.notes if words in note]
    assert len(notes) == 1 and len(config.notes) == 1, config.notes
    assert f"{tmp_path}/run.json:" in notes[0]
    assert config.precision.compute_dtype == "float32"


IN_PYTHON = [
    ({"max_steps": 0}, "max_steps: 0 trains nothing"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end needs evaluation_strategy"),
]


@pytest.mark.parametrize(("values", "words"), IN_PYTHON, ids=str)
def test_check_trainer_config_values_that_a_file_would_adjust_are_errors(tmp_path, values, words):
    with pytest.raises(ConfigError, match=words):
        check_trainer_config(make_config(tmp_path, **values))


def test_rules_every_rule_has_a_case(tmp_path, monkeypatch):
    """Count the rules of training that report something in the cases above, by their functions."""
    silent = set()
    for rules in (training.run_rules, training.rules, training.idle_rules):
        recorded = [(keys, _remove_when_reporting(rule, silent)) for keys, rule in rules._rules]
        monkeypatch.setattr(rules, "_rules", recorded)
    assert len(silent) > 10
    for values, _ in CONTRADICTIONS:
        problems(write(tmp_path, SMALLEST | values))
    for values, _ in IDLE:
        load(write(tmp_path, SMALLEST | {"device": "cpu"} | values))
    for values, _ in IN_PYTHON:
        with pytest.raises(ConfigError):
            check_trainer_config(make_config(tmp_path, **values))
    assert silent == set()


def _remove_when_reporting(rule, silent: set[str]):
    silent.add(rule.__name__)

    @functools.wraps(rule)  # rules are called by the names of their parameters
    def watched(**arguments):
        report = arguments["report"]
        before = len(report.problems) + len(report.notes)
        rule(**arguments)
        if len(report.problems) + len(report.notes) > before:
            silent.discard(rule.__name__)

    return watched


@pytest.mark.parametrize(
    ("written", "name", "greater"),
    [
        (None, "loss", False),
        ("no", "loss", False),
        ("eval_loss", "loss", False),
        ("ppl", "perplexity", False),
        ("eval_accuracy", "accuracy", True),
        ("rougeL", "rougel", True),
        ("bleu", "bleu4", True),
    ],
)
def test_best_metric_spellings_become_one_name(tmp_path, written, name, greater):
    path = write(tmp_path, SMALLEST | {"metric_for_best_model": written, "eval_with_do_generation": True})
    train = load(path).train
    assert (train.metric_for_best_model, train.greater_is_better) == (name, greater)
    assert load(path, "--greater_is_better").train.greater_is_better is True


def test_recompute_options_are_parsed(tmp_path):
    keys = {"recompute": True, "refined_recompute": "mlp_row_ln:5, flash_attn:-1", "no_recompute_layers": [2, 0]}
    train = load(write(tmp_path, SMALLEST | keys)).train
    assert parse_refined(train.refined_recompute) == {"mlp_row_ln": 5, "flash_attn": -1}
    assert parse_layers(train.no_recompute_layers) == (0, 2)
    by_word = load(write(tmp_path, SMALLEST | keys), "--no_recompute_layers", "1,0").train
    assert parse_layers(by_word.no_recompute_layers) == (0, 1)
    assert parse_layers(None) == () == parse_layers("[]")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"refined_recompute": "mlp_ln:5"}, "unknown region 'mlp_ln'; use one of attention_column_ln"),
        ({"refined_recompute": "mlp_row_ln"}, "or mlp_row_ln:-1 for all"),
        ({"refined_recompute": "mlp_row_ln:-2"}, "or mlp_row_ln:-1 for all"),
        ({"refined_recompute": "mlp_row_ln:1,mlp_row_ln:2"}, "region mlp_row_ln is repeated"),
        ({"refined_recompute": "mlp_row_ln:1", "recompute_granularity": "core_attn"}, "leave out one of the two"),
        ({"no_recompute_layers": [0, "last"]}, "'last' is not a layer index"),
        ({"no_recompute_layers": [-1]}, "-1 is not a layer index"),
        ({"no_recompute_layers": True}, "True is not a layer index"),
    ],
    ids=str,
)
def test_recompute_options_with_invalid_values_are_refused(tmp_path, keys, words):
    (found,) = problems(write(tmp_path, SMALLEST | {"recompute": True} | keys))
    assert words in found.message


def test_recompute_options_without_recompute_are_noted(tmp_path):
    keys = {"recompute_granularity": "core_attn", "refined_recompute": "flash_attn:-1", "no_recompute_layers": [0]}
    notes = load(write(tmp_path, SMALLEST | keys | {"offload_recompute_inputs": True})).notes
    assert len(notes) == 4 and all("recompute is false" in note for note in notes)
