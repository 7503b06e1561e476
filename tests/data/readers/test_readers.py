"""Readers: every format has the same rows, in blocks of any size, from any block on."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from paddlenlp_ext.data.readers import base, column_batches, compression, csv_rows, json_array, json_lines, parquet
from paddlenlp_ext.data.readers.dataset_files import open_reader
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.row_formats import parse_row

ROWS = [
    {
        "src": f"Frage {index}: " + 'ü{}[],"\\ ' * (index % 7),
        "tgt": "\n" * (index % 3) + f"Antwort {index}",
        "n": [index],
    }
    for index in range(60)
]
LINES = "\r\n".join(
    json.dumps(row, ensure_ascii=bool(index % 2)) + "\n" * (index % 2) for index, row in enumerate(ROWS)
)
ARRAY = "\ufeff \n" + json.dumps(ROWS, indent=1, ensure_ascii=False) + "\n\n"


def compressed(content: bytes, suffix: str) -> bytes:
    """Compress a text as two members (gzip) or frames (Zstandard), as `cat a.gz b.gz` would."""
    half = len(content) // 2
    compress = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    return compress(content[:half]) + compress(content[half:])


def write(folder: Path, name: str, group_rows: int = 25) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=group_rows)
        return path
    if name.endswith(".arrow"):
        table = pyarrow.Table.from_pylist(ROWS)
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table, max_chunksize=group_rows)
        return path
    content = (ARRAY if name.startswith("array") else LINES).encode()
    path.write_bytes(compressed(content, path.suffix) if path.suffix in (".gz", ".zst") else content)
    return path


FILES = [
    *(f"lines.jsonl{end}" for end in ("", ".gz", ".zst")),
    *(f"lines.json{end}" for end in ("", ".gz")),
    *(f"array.json{end}" for end in ("", ".gz", ".zst")),
    "rows.parquet",
    "rows.arrow",
]


@pytest.fixture(params=[1, 50, 700, 1 << 18])
def block_size(request, monkeypatch):
    """Set the size of blocks, from less than a row to all rows."""
    for module in (base, json_array, json_lines):
        monkeypatch.setattr(module, "BLOCK_BYTES", request.param)
    for module in (column_batches, csv_rows, parquet):
        monkeypatch.setattr(module, "BLOCK_ROWS", min(request.param, 7))


@pytest.mark.parametrize("name", FILES)
def test_reader_blocks_of_any_size_hold_all_rows_and_resume_anywhere(name, block_size, tmp_path):
    reader = open_reader(write(tmp_path, name))
    blocks = list(reader.blocks())
    rows = [row for block in blocks for row in block.rows()]
    assert [row.value for row in rows] == ROWS
    assert [row.location for row in rows] == [row.location for row in reader.rows()]
    assert blocks[-1].fraction == 1.0
    assert list(np.argsort([block.fraction for block in blocks], kind="stable")) == list(range(len(blocks)))
    num_read = 0
    for block in blocks:
        num_read += len(list(block.rows()))
        rest = [row for later in reader.blocks(block.end) for row in later.rows()]
        assert rest == rows[num_read:], f"resumed at {block.end}"


@pytest.mark.parametrize("name", [name for name in FILES if ".json" in name])
def test_reader_locations_are_those_of_the_text(name, block_size, tmp_path):
    reader = open_reader(write(tmp_path, name))
    lines = (ARRAY if name.startswith("array") else LINES).removeprefix("\ufeff").split("\n")
    for row in reader.rows():
        assert lines[row.location.line - 1][row.location.column - 1] == "{"
        assert row.value == json.loads(row.text)


def test_parquet_reader_leaves_null_columns_out(tmp_path):
    rows = [{"src": "a", "tgt": "b", "system": None}, {"src": None, "tgt": "d", "system": "s"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = [row.value for row in open_reader(tmp_path / "rows.parquet").rows()]
    assert found == [{"src": "a", "tgt": "b"}, {"tgt": "d", "system": "s"}]


CSV_ROWS = [
    {"src": f'Frage {index}, "ü"' + "\n\n" * (index % 3), "tgt": f"Antwort {index}"}
    | ({"system": "s"} if index % 2 else {})
    for index in range(60)
]
"""Rows with quotes, commas, line breaks and empty values."""


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_csv_reader_blocks_of_any_size_hold_all_rows_and_resume_anywhere(end, line_break, block_size, tmp_path):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["src", "tgt", "system"], lineterminator=line_break)
    writer.writeheader()
    writer.writerows(CSV_ROWS)
    content = ("\ufeff" + text.getvalue() + line_break).encode()
    path = tmp_path / f"rows.csv{end}"
    path.write_bytes(compressed(content, end) if end else content)
    reader = open_reader(path)
    blocks = list(reader.blocks())
    rows = [row for block in blocks for row in block.rows()]
    assert [row.value for row in rows] == CSV_ROWS and blocks[-1].fraction == 1.0
    lines = content.decode().split("\n")
    assert all(lines[row.location.line - 1].startswith(f'"Frage {index},') for index, row in enumerate(rows))
    num_read = 0
    for block in blocks:
        num_read += len(list(block.rows()))
        rest = [row for later in reader.blocks(block.end) for row in later.rows()]
        assert rest == rows[num_read:], f"resumed at {block.end}"


def test_csv_reader_of_damaged_lines_locates_each(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b'src,tgt\na,b\na,b,c\n"a"x,b\n\na\n\xe4,b\nc,d\n"e,f\n')
    rows = list(open_reader(tmp_path / "rows.csv").rows())
    found = [(row.location.line, getattr(row, "message", None)) for row in rows]
    quote = "quote the value, and double the quotes in it"
    assert found == [
        (2, None),
        (3, "3 values for the 2 columns src, tgt; quote values that contain a comma"),
        (4, f"',' expected after '\"'; {quote}"),
        (6, "1 values for the 2 columns src, tgt; quote values that contain a comma"),
        (7, None),
        (8, None),
        (9, f"unexpected end of data; {quote}"),
    ]
    with pytest.raises(InvalidRowError, match=r"UTF-8|surrogate"):
        parse_row(rows[4].value)


@pytest.mark.parametrize("header", ["src,src", "src,,tgt"])
def test_csv_reader_with_unclear_columns_names_them(header, tmp_path):
    (tmp_path / "rows.csv").write_text(f"{header}\na,b\n")
    with pytest.raises(ValueError, match=r"rows.csv:1: the columns are 'src', .*must name each column once"):
        list(open_reader(tmp_path / "rows.csv").rows())


@pytest.mark.parametrize("name", ["lines.jsonl.gz", "lines.jsonl.zst", "array.json.gz", "rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_reader_of_a_damaged_file_names_it(name, damage, tmp_path):
    path = write(tmp_path, name)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 9] if damage == "truncated" else b"x" * 100)
    with pytest.raises(ValueError, match=rf"{path}: .*damaged"):
        list(open_reader(path).rows())


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("lines.jsonl.zst", "zstandard", r"pip install 'paddlenlp-ext\[zstd\]'"),
        ("rows.parquet", "pyarrow.parquet", r"pip install 'paddlenlp-ext\[parquet\]'"),
        ("rows.arrow", "pyarrow.ipc", r"pip install 'paddlenlp-ext\[parquet\]'"),
    ],
)
def test_reader_without_its_package_names_the_extra(name, module, command, tmp_path, monkeypatch):
    path = write(tmp_path, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{path}: needs the package .*{command}"):
        list(open_reader(path).rows())


def test_json_array_with_a_long_open_string_is_read_to_its_end_only_once(tmp_path, monkeypatch):
    """Check that the text of one long element grows in doubling steps, so that reading it takes linear time."""
    monkeypatch.setattr(json_array, "BLOCK_BYTES", 64)
    path = tmp_path / "array.json"
    path.write_text(json.dumps([{"src": "a" * 50_000, "tgt": "b"}]))
    calls = []
    real = json_array.read_value
    monkeypatch.setattr(json_array, "read_value", lambda *args, **keys: calls.append(1) or real(*args, **keys))
    assert [len(row.value["src"]) for row in open_reader(path).rows()] == [50_000]
    assert len(calls) < 15


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.zst"])
def test_reader_of_a_row_beyond_the_limit_names_the_file(name, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "MAX_ROW_BYTES", 1 << 20)
    monkeypatch.setattr(json_array, "MAX_ROW_BYTES", 1 << 20)
    row = json.dumps({"src": "x" * (3 << 20), "tgt": "y"}).encode()
    content = b"[" + row + b"]" if ".json" in Path(name).suffixes else row
    path = tmp_path / name
    path.write_bytes(compressed(content, path.suffix) if path.suffix in (".gz", ".zst") else content)
    problem = "a row is longer than 1 MiB; split it into several rows"
    if b"[" in content:
        (found,) = open_reader(path).rows()
        assert problem in found.message and found.fatal and found.location.file == str(path)
    else:
        with pytest.raises(ValueError, match=problem) as caught:
            list(open_reader(path).rows())
        assert str(path) in str(caught.value)


def test_reader_of_a_zstandard_bomb_decompresses_little_at_a_time(tmp_path):
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 27))
    (tmp_path / "a.jsonl.zst").write_bytes(bomb)
    with open(tmp_path / "a.jsonl.zst", "rb") as file:
        stream = compression.ByteStream(file, tmp_path / "a.jsonl.zst")
        stream.read(1)
        assert len(stream._stream.raw._output) <= 1 << 26
