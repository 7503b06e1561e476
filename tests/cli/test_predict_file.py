"""Test prediction into a file: order, content, interruption, and log lines without a terminal."""

from __future__ import annotations

import json
import logging

import pytest

from paddlenlp_ext.cli import predict_file as module
from paddlenlp_ext.cli import progress
from paddlenlp_ext.cli.predict_file import PredictionRow, predict_file
from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.utils.files import sole_writer
from tests.common.processes import another_process
from tests.generation.tiny_models import random_prompts, tiny_model

PROMPTS = random_prompts((5, 20, 1, 9, 3, 14, 2))
ROWS = [PredictionRow(prompt, f"frage ß {number}", "") for number, prompt in enumerate(PROMPTS)]
INPUTS = {"inputs": {"seed": 4}}
OPTIONS = {"max_new_tokens": 6, "decode_strategy": "sampling", "seed": 4, "eos_token_id": [3, 5, 7]}


def test_predict_file_keeps_row_order_across_parts(tmp_path, monkeypatch):
    """Test several parts of several batches; the samples of a row depend on its number in the file."""
    monkeypatch.setattr(module, "_BATCHES_PER_PART", 2)
    model, output = tiny_model("llama_grouped_heads"), tmp_path / "new" / "output.json"
    predict_file(model, ROWS, str, output, batch_size=2, **INPUTS, **OPTIONS)
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    expected = generate(model, PROMPTS, **OPTIONS)
    assert len(set(map(tuple, expected))) == len(expected)
    assert lines == [{"src": row.src, "tgt": "", "output": str(t)} for row, t in zip(ROWS, expected, strict=True)]
    assert "ß" in output.read_text(encoding="utf-8")
    assert [path.name for path in output.parent.iterdir()] == ["output.json"]


def test_predict_file_interrupted_keeps_earlier_output(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BATCHES_PER_PART", 1)
    output = tmp_path / "output.json"
    output.write_text("earlier")
    answered = []

    def decode(tokens: list[int]) -> str:
        if len(answered) == 5:
            raise KeyboardInterrupt
        answered.append(tokens)
        return "a"

    with pytest.raises(KeyboardInterrupt):
        predict_file(tiny_model("llama_grouped_heads"), ROWS, decode, output, batch_size=2, max_new_tokens=2, **INPUTS)
    assert output.read_text() == "earlier"
    assert len((tmp_path / ".output.json.incomplete").read_text().splitlines()) >= 4


def test_predict_file_interrupted_run_continues_after_its_last_complete_line(tmp_path, monkeypatch):
    """Interrupt after two of four parts, cut a line as a crash does, and continue in batches of another size."""
    monkeypatch.setattr(module, "_BATCHES_PER_PART", 1)
    model, output = tiny_model("llama_grouped_heads"), tmp_path / "output.json"
    predict_file(model, ROWS, str, output, batch_size=2, **INPUTS, **OPTIONS)
    expected, decoded = output.read_text(encoding="utf-8"), []
    output.unlink()

    def decode(tokens: list[int]) -> str:
        decoded.append(tokens)
        if len(decoded) == 5:
            raise KeyboardInterrupt
        return str(tokens)

    with pytest.raises(KeyboardInterrupt):
        predict_file(model, ROWS, decode, output, batch_size=2, **INPUTS, **OPTIONS)
    draft = tmp_path / ".output.json.incomplete"
    with draft.open("a") as lines:
        lines.write('{"src": "fra')
    with pytest.raises(
        ValueError, match=r"has answers of an interrupted run with other inputs \(seed, dtype\); repeat"
    ):
        predict_file(model, ROWS, decode, output, batch_size=2, inputs={"seed": 5, "dtype": "float32"}, **OPTIONS)
    predict_file(model, ROWS, decode, output, batch_size=3, **INPUTS, **OPTIONS)
    assert output.read_text(encoding="utf-8") == expected
    assert len(decoded) == 5 + len(ROWS) - 4 and [path.name for path in tmp_path.iterdir()] == ["output.json"]


def test_predict_file_that_another_process_writes_is_refused(tmp_path):
    output = tmp_path / "output.json"
    with (
        another_process(sole_writer(output)) as writer,
        pytest.raises(ValueError, match=rf"output.json: process {writer} on .* is writing"),
    ):
        predict_file(tiny_model("llama_grouped_heads"), ROWS, str, output, batch_size=2, **INPUTS, **OPTIONS)
    assert not output.exists()


def test_predict_file_without_terminal_logs_progress(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(progress, "_SECONDS_PER_LOG_LINE", 0.0)
    monkeypatch.setattr(progress.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(progress.logger, "propagate", False)
    with caplog.at_level(logging.INFO, logger=progress.logger.name):
        options = {"batch_size": 1, "max_new_tokens": 2, **INPUTS}
        predict_file(tiny_model("llama_grouped_heads"), ROWS[:3], str, tmp_path / "o", **options)
    assert [record.getMessage().split(",")[:2] for record in caplog.records] == [
        [f"{n} of 3 rows", f" {2 * n} new tokens"] for n in (1, 2, 3)
    ]
    assert [record.getMessage().endswith("0:00:00 left") for record in caplog.records] == [True, True, False]
