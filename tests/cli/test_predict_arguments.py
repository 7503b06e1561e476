"""Command line of the predictor: PaddleNLP's defaults, neutral values of unsupported options, and errors."""

from __future__ import annotations

import pytest

from paddlenlp_ext.cli.predict_arguments import _NEUTRAL_VALUES, parse_arguments
from paddlenlp_ext.utils.logging import get_logger

SPECULATE = ["--speculate_method", "inference_with_reference"]
MODEL = ["--model_name_or_path", "m"]


def test_parse_arguments_defaults_equal_paddlenlp():
    arguments = parse_arguments(MODEL)
    lengths = (arguments.src_length, arguments.max_length, arguments.total_max_length, arguments.batch_size)
    assert lengths == (1024, 1024, 4096, 1)
    sampling = (arguments.decode_strategy, arguments.top_k, arguments.top_p, arguments.temperature)
    assert sampling == ("sampling", 0, 0.7, 0.95) and arguments.repetition_penalty == 1.0
    assert arguments.output_file == "output.json" and arguments.data_file is None and arguments.adapter_path is None


def test_parse_arguments_converts_values_and_accepts_other_spellings():
    arguments = parse_arguments([*MODEL, "--top-p=0.5", "--max_length", "7", "--use_flash_attention", "False"])
    assert (arguments.top_p, arguments.max_length, arguments.use_flash_attention) == (0.5, 7, False)
    assert parse_arguments([*MODEL, "--prefix_path", "p"]).adapter_path == "p"
    assert parse_arguments([*MODEL, "--lora_path", "a-b", "--dtype", "null"]).lora_path == "a-b"


def test_parse_arguments_of_decoding_reach_generate():
    beams = parse_arguments([*MODEL, "--decode_strategy", "beam_search", "--num_beams", "4", "--length_penalty", "0.5"])
    options = beams.decoding_options()
    assert (options["num_beams"], options["length_penalty"], options["min_new_tokens"]) == (4, 0.5, 0)
    assert parse_arguments([*MODEL, "--min_length", "3"]).decoding_options()["min_new_tokens"] == 3
    sizes = ["--speculate_max_draft_token_num", "5", "--speculate_max_ngram_size", "2"]
    drafts = parse_arguments([*MODEL, *SPECULATE, *sizes]).decoding_options()
    assert (drafts["max_draft_tokens"], drafts["max_ngram_size"]) == (5, 2)
    assert "max_draft_tokens" not in parse_arguments([*MODEL, "--speculate_method", "None"]).decoding_options()


def test_parse_arguments_of_drafts_without_their_method_warn(caplog, monkeypatch):
    monkeypatch.setattr(get_logger(), "propagate", True)
    parse_arguments([*MODEL, *SPECULATE, "--speculate_max_ngram_size", "2"])
    assert not caplog.records
    parse_arguments([*MODEL, "--speculate_max_ngram_size", "2"])
    assert "--speculate_max_ngram_size has no effect without --speculate_method" in caplog.text


def test_parse_arguments_in_several_processes_raises(monkeypatch):
    """Check that several processes are refused, as all would write to `.output.json.incomplete`."""
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "1")
    parse_arguments(MODEL)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(ValueError, match="2 processes were started, but prediction runs in one"):
        parse_arguments(MODEL)


@pytest.mark.parametrize("name", _NEUTRAL_VALUES)
def test_parse_arguments_unsupported_option_accepts_only_its_neutral_value(name):
    neutral = _NEUTRAL_VALUES[name]
    parse_arguments([*MODEL, f"--{name}", str(neutral)])
    parse_arguments([*MODEL, f"--{name}={str(neutral).lower()}"])
    other = str(not neutral).lower() if isinstance(neutral, bool) else {"dynamic": "static"}.get(neutral, "17")
    with pytest.raises(ValueError, match=rf"--{name}: {name}: {other} is not available yet \(leave it"):
        parse_arguments([*MODEL, f"--{name}", other])


def test_parse_arguments_switch_without_value_means_true():
    with pytest.raises(ValueError, match="--avx_model: avx_model: true is not available yet"):
        parse_arguments([*MODEL, "--avx_model"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "model_name_or_path"),
        ([*MODEL, "--modle_name_or_path", "x"], "did you mean 'model_name_or_path'"),
        ([*MODEL, "--batchsize", "2"], "did you mean 'batch_size'"),
        ([*MODEL, "--xyzzy", "2"], "unknown key 'xyzzy'; --help lists the keys"),
        ([*MODEL, "stray"], "unexpected argument 'stray'"),
        ([*MODEL, "--top_k", "many"], 'top_k: expected a whole number, got "many"'),
        ([*MODEL, "--use_flash_attention", "maybe"], 'use_flash_attention: expected true or false, got "maybe"'),
        ([*MODEL, "--dtype", "int3"], 'dtype: "int3" is not one of: float32, bfloat16, float16'),
        ([*MODEL, "--decode_strategy", "beam_search"], "beam_search with num_beams 1"),
        ([*MODEL, "--min_length", "1025"], "--min_length 1025 is above --max_length 1024"),
        ([*MODEL, "--speculate_method", "eagle"], 'speculate_method: "eagle" is not one of: inference_with_reference'),
        (
            [*MODEL, *SPECULATE, "--batch_size", "2"],
            "batch_size 2: speculative decoding runs one row at a time; set batch_size to 1",
        ),
        ([*MODEL, "--top_p", "2"], "top_p is 2.0; it must be from 0 to 1"),
        ([*MODEL, "--batch_size", "0"], "batch_size: 0 is out of range; allowed: at least 1"),
        ([*MODEL, "--lora_path", "a", "--prefix_path", "b"], "keep one, because a run has one adapter"),
        ([*MODEL, "--regex", "a", "--json_schema", "b"], "keep one, because an answer has one format"),
        ([*MODEL, "--regex", "a", "--min_length", "1"], "min_new_tokens 1 with --regex"),
        (
            [*MODEL, "--json_schema", "a", "--decode_strategy", "beam_search", "--num_beams", "2"],
            "beam_search cannot use --json_schema",
        ),
        ([*MODEL, "--src_length", "4000"], "make 5024 tokens, more than --total_max_length 4096"),
    ],
)
def test_parse_arguments_invalid_argument_is_named(words, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(words)
