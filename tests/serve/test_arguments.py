"""Command line of the server: adapters, names, and the API key."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_ext.serve.arguments import KEY_VARIABLE, parse_arguments

MODEL = ["--model_name_or_path", "org/model"]


@pytest.mark.parametrize(
    "words",
    [
        ["--lora_path", "a=x", "b=y,z", "--port", "1"],
        ["--lora_path", "a=x", "--port", "1", "--lora_path", "b=y,z"],
        ["--lora-path=a=x", "--lora_path=b=y,z", "--port", "1"],
    ],
)
def test_lora_path_takes_several_words_and_repetitions(words):
    arguments = parse_arguments([*MODEL, *words])
    assert (arguments.adapters, arguments.port) == ({"a": "x", "b": "y,z"}, 1)
    assert arguments.adapter_path == "x"


def test_adapter_and_base_without_a_name_have_that_of_their_folder(tmp_path: Path):
    (tmp_path / "base").mkdir()
    arguments = parse_arguments(["--model_name_or_path", f"{tmp_path}/base/", "--lora_path", "runs/x=1/tuned/"])
    assert (arguments.base_name, arguments.adapters) == ("base", {"tuned": "runs/x=1/tuned/"})
    assert parse_arguments(MODEL).base_name == "org/model"
    assert parse_arguments([*MODEL, "--served_model_name", "m"]).base_name == "m"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora_path", "a=x", "a=y"], "two adapters are named 'a'"),
        (["--lora_path", "a="], "'a=' is not NAME=FOLDER"),
        (["--lora_path", "x=folder", "--served_model_name", "x"], "are both named 'x'"),
        (["--served_model_name", "a\nb"], r"the name 'a\\nb' of a served model has characters that cannot be printed"),
        (["--lora_path", "\x1b[31m=x"], r"the name '\\x1b\[31m' of a served model"),
        (["--lora_path", "--port", "1"], "a value is missing after --lora_path"),
        (["--host", "0.0.0.0"], f"requires an API key; set {KEY_VARIABLE} or --api_key_file"),
        (["--host", "example.org"], "requires an API key"),
        (["--api_key_file", "missing"], "--api_key_file missing is not a file"),
        (["--port", "70000"], "port"),
        (["--max_batch_size", "0"], "max_batch_size"),
        (["--prot", "1"], "did you mean"),
    ],
)
def test_arguments_that_cannot_work_are_refused(words, message, monkeypatch, tmp_path):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        parse_arguments([*MODEL, *words])


def test_api_key_comes_from_the_file_or_the_environment(tmp_path: Path, monkeypatch):
    (tmp_path / "key").write_text("from-file \nrest\n")
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    everywhere = [*MODEL, "--host", "0.0.0.0"]
    assert parse_arguments(everywhere).api_key() == "from-environment"
    assert parse_arguments([*everywhere, "--api_key_file", str(tmp_path / "key")]).api_key() == "from-file"
    for bad in ("", "schlüssel"):
        monkeypatch.setenv(KEY_VARIABLE, bad)
        with pytest.raises(ValueError, match="the key is empty or not printable ASCII"):
            parse_arguments(MODEL)
