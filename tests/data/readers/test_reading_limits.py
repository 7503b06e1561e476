"""Limits of readers: files that expand to far more than their size are refused, with file and remedy."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from paddlenlp_ext.data.readers import arrow, column_batches, compression, parquet
from paddlenlp_ext.data.readers.dataset_files import open_reader

ROW = b'{"src": "a", "tgt": "b"}'
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_reader_of_white_space_beyond_the_limit_names_the_file(name, end, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "MAX_BLANK_BYTES", 1 << 20)
    before = {"rows.jsonl": ROW, "rows.json": b"[" + ROW + b",", "rows.csv": b"src,tgt\na,b"}[name]
    path = tmp_path / f"{name}{end}"
    path.write_bytes(COMPRESS[end](before + b"\n" * (1 << 21)))
    with pytest.raises(ValueError, match=f"{name}{end}: more than 1 MiB of whitespace between two rows; remove it"):
        list(open_reader(path).rows())


@pytest.mark.parametrize("end", COMPRESS)
def test_reader_of_white_space_below_the_limit_reads_the_rows(end, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "MAX_BLANK_BYTES", 1 << 20)
    path = tmp_path / f"rows.jsonl{end}"
    path.write_bytes(COMPRESS[end]((ROW + b"\n" * (1 << 19)) * 4))
    assert [row.location.line for row in open_reader(path).rows()] == [1 + (index << 19) for index in range(4)]


def repeated_text(num_rows: int, size: int) -> pyarrow.Table:
    """Return a table whose rows refer to one string, which is stored once."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num_rows, "int32"), ["a" * size])
    return pyarrow.table({"src": texts, "tgt": ["b"] * num_rows})


def write_columns(path: Path, table: pyarrow.Table) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression="zstd")
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_reader_of_rows_that_share_a_long_string_yields_small_blocks(name, tmp_path, monkeypatch):
    monkeypatch.setattr(column_batches, "MAX_ROW_BYTES", 1 << 17)
    blocks = list(open_reader(write_columns(tmp_path / name, repeated_text(100, 50_000))).blocks())
    assert max(len(list(block.rows())) for block in blocks) <= 2
    assert sum(len(list(block.rows())) for block in blocks) == 100


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("nested", [False, True])
def test_reader_of_a_row_of_columns_beyond_the_limit_names_it(name, nested, tmp_path, monkeypatch):
    monkeypatch.setattr(column_batches, "MAX_ROW_BYTES", 1 << 17)
    table = pyarrow.table({"src": [["a" * 1000], ["a" * 1000] * 200]}) if nested else repeated_text(2, 1 << 18)
    line = 2 if nested else 1
    with pytest.raises(ValueError, match=rf"{name}:{line}: a row is longer than .* MiB; split it into several rows"):
        list(open_reader(write_columns(tmp_path / name, table)).rows())


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_arrow_reader_of_compressed_columns_beyond_the_limit_raises_before_decompression(
    compression, tmp_path, monkeypatch
):
    path, table = tmp_path / "rows.arrow", repeated_text(10_000, 5000).append_column("n", [range(10_000)])
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.ipc.new_stream(str(path), table.schema, options=options) as stream:
        stream.write_table(table)
    assert len(list(open_reader(path).rows())) == 10_000
    monkeypatch.setattr(arrow, "_MAX_EXPANDED_BYTES", 170_000)  # 40 kB of indices, 80 kB of n, 50 kB of tgt
    if compression is None:
        assert len(list(open_reader(path).rows())) == 10_000
    else:
        with pytest.raises(
            ValueError, match=f"{path}: the compressed columns expand to more than 0 GiB; save the dataset"
        ):
            list(open_reader(path).rows())
    monkeypatch.setattr(arrow, "_MAX_EXPANDED_BYTES", 180_000)
    assert len(list(open_reader(path).rows())) == 10_000


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        ("_MAX_GROUP_BYTES", r"row group 0 expands to 0.0 GiB; the maximum is 0 GiB; .*smaller row groups"),
        ("_MAX_GROUP_VALUES", r"row group 0 has 100 values of src; the maximum is 10; .*smaller row groups"),
    ],
)
def test_parquet_reader_of_a_row_group_beyond_the_limit_names_it_before_reading(limit, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, limit, 10)
    path = write_columns(tmp_path / "rows.parquet", repeated_text(100, 1000))
    with pytest.raises(ValueError, match=f"{path}: {problem}"):
        list(open_reader(path).rows())


@pytest.mark.parametrize(
    ("name", "ends", "problem"),
    [
        ("rows.parquet", [1, 2], "rows 1 to 2: text that is not UTF-8"),
        ("rows.arrow", [1, 2], "not an Arrow stream, or damaged .*Invalid UTF8 sequence at string index 1"),
        ("rows.arrow", [3, 2], "not an Arrow stream, or damaged .*offset"),
    ],
)
def test_reader_of_columns_with_wrong_buffers_raises(name, ends, problem, tmp_path):
    buffers = pyarrow.py_buffer(np.array([0, *ends], "int32")), pyarrow.py_buffer(b"a\xff")
    path = write_columns(tmp_path / name, pyarrow.table({"src": pyarrow.StringArray.from_buffers(2, *buffers)}))
    with pytest.raises(ValueError, match=f"{name}: {problem}"):
        list(open_reader(path).rows())
