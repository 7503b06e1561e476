"""Tokenizing in several processes gives the arrays of one process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.data.readers import json_lines
from paddlenlp_ext.data.readers.dataset_files import open_reader
from paddlenlp_ext.data.rows.errors import DataError
from paddlenlp_ext.data.templates.plain import PlainTemplate
from paddlenlp_ext.data.tokenization import workers as encode
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.data.tokenization.workers import BlockEncoder, num_workers, tokenize
from paddlenlp_ext.utils.stop_signals import STOP_SIGNALS


@pytest.fixture
def readers(tmp_path, monkeypatch):
    """Return readers of two files in blocks of a few rows; two rows are invalid, and some are truncated."""
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 500)
    for name in ("a", "b"):
        rows = [{"src": f"{name} {index} " * (index % 30), "tgt": "vier", "note": index} for index in range(100)]
        lines = [json.dumps(row) for row in rows]
        lines[40] = '{"src": "no answer"}'
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [open_reader(tmp_path / f"{name}.jsonl") for name in ("a", "b")]


@pytest.fixture
def encoder(readers, tokenizer):
    files = tuple(reader.name for reader in readers)
    return RowEncoder(PlainTemplate(tokenizer), LengthLimits(40, 60, "right"), False, files)


def tokenized(folder: Path, readers, encoder, num_processes: int) -> dict[str, bytes]:
    """Return the files that tokenizing writes, with the statistics."""
    folder.mkdir()
    stats = tokenize(readers, encoder, folder, "drop", num_processes)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {"stats": stats.to_json()}


def test_tokenize_in_several_processes_writes_the_files_of_one(readers, encoder, tmp_path):
    one, two = (tokenized(tmp_path / str(number), readers, encoder, number) for number in (1, 2))
    assert one == two
    assert one["stats"]["num_read"] == 200 and one["stats"]["dropped"] == {"missing key": 2}
    arrays = TokenArrays.load(tmp_path / "2")
    assert len(arrays) == 198 and arrays.locations[-1].tolist() == [1, 100, 1]


def test_tokenize_in_several_processes_reports_all_invalid_rows(readers, encoder, tmp_path):
    with pytest.raises(DataError) as caught:
        tokenize(readers, encoder, tmp_path, "error", 2)
    assert [(problem.location.file, problem.location.line) for problem in caught.value.problems] == [
        (reader.name, 41) for reader in readers
    ]


def test_token_writer_files_are_those_of_numpy(readers, encoder, tmp_path):
    tokenized(tmp_path / "set", readers, encoder, 1)
    for path in (tmp_path / "set").glob("*.npy"):
        np.save(tmp_path / "copy.npy", np.load(path))
        assert path.read_bytes() == (tmp_path / "copy.npy").read_bytes()


def kill_worker(block):
    """End the worker; a function of the module, as a task of another process has to be picklable."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_block_encoder_with_a_killed_worker_raises(readers, encoder, monkeypatch):
    monkeypatch.setattr(encode, "_encode_in_worker", kill_worker)
    with BlockEncoder(encoder, 2) as workers, pytest.raises(ValueError, match="lower dataset_num_proc"):
        list(workers.encode(readers[0].blocks()))


def test_num_workers_follows_the_request_and_the_size_of_the_data(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert num_workers(3, 0) == 3
    assert num_workers(None, 1000) == 1
    assert num_workers(None, 3 * encode.BYTES_PER_WORKER) == 4
    assert num_workers(None, 10**12) == 8


def test_tokenize_logs_rows_and_the_position_in_the_file(readers, encoder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(encode, "_PROGRESS_SECONDS", -1.0)
    with caplog.at_level("INFO", logger="paddlenlp_ext"):
        tokenize(readers, encoder, tmp_path, "drop", 1)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("tokenizing: ")]
    assert lines[-1] == "tokenizing: 200 rows, 100% of the current file" and len(lines) > 10


def handlers_in_worker(block):
    """Return the handlers of the stop signals, as the encoder of a pool."""
    return [signal.getsignal(number) for number in STOP_SIGNALS]


def test_workers_ignore_stop_signals_except_the_one_that_ends_them():
    """Test that a closed terminal or a batch system, whose signals reach all processes, leaves the pool running."""
    with BlockEncoder(handlers_in_worker, 2) as workers:
        (handlers,) = workers.encode([None])
    assert dict(zip(STOP_SIGNALS, handlers, strict=True)) == {
        **dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN),
        signal.SIGTERM: signal.SIG_DFL,
    }
