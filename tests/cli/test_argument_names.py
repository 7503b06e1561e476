"""Names that all programs accept for model, adapter, data, output and lengths."""

from __future__ import annotations

import pytest

from paddlenlp_ext.cli import (
    export_gguf,
    export_model_arguments,
    merge_peft_params,
    predict_arguments,
    sampling_arguments,
)
from paddlenlp_ext.evaluation import arguments as evaluation
from paddlenlp_ext.serve import arguments as serve


def test_predictor_accepts_the_common_names():
    words = "--model m --adapter a --data d.jsonl --out o.jsonl --max-new-tokens 5 --max-prompt-length 6"
    named = predict_arguments.parse_arguments(words.split())
    assert (named.model_name_or_path, named.lora_path) == ("m", "a")
    assert (named.data_file, named.output_file) == ("d.jsonl", "o.jsonl")
    assert (named.max_length, named.src_length) == (5, 6)


@pytest.mark.parametrize(
    "parse",
    [
        export_gguf.export_arguments,
        export_model_arguments.parse_arguments,
        lambda argv: merge_peft_params.merge_arguments(argv, "", "--peft_path", ("--merged_path",)),
        lambda argv: sampling_arguments.parse_arguments([*argv, "--data", "d", "--reward_funcs", "f.g"])[0],
        lambda argv: evaluation.parse_arguments([*argv, "--data_file", "d", "--task", "perplexity", "--text", "t"])[0],
    ],
)
def test_programs_accept_model_adapter_and_out(parse):
    named = parse(["--model", "m", "--adapter", "a", "--out", "o"])
    outputs = {getattr(named, name, None) for name in ("output_file", "output_path", "output_dir")}
    assert (named.model_name_or_path, outputs - {None}) == ("m", {"o"})
    assert getattr(named, "lora_path", None) == "a" or named.adapter_path == "a"


def test_server_accepts_several_adapters_by_the_common_name():
    named = serve.parse_arguments(["--model", "m", "--adapter", "x=a", "y=b", "--adapter", "z=c"])
    assert named.adapters == {"x": "a", "y": "b", "z": "c"}
