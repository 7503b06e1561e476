"""Compressed, Parquet, Arrow and JSON files that expand to far more than their size, whole or damaged."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from paddlenlp_ext.data.readers.dataset_files import open_reader
from paddlenlp_ext.utils.files import read_json_object
from tests.stress.fuzz_rows import tiny_encoder
from tests.stress.wrong_values import damage

_ROW = b'{"src": "a", "tgt": "b"}\n'


def _repeated(rng: random.Random) -> bytes:
    """Return a text that repeats a few bytes, between two rows."""
    part = rng.choice((b"\n", b" ", b"\n\n \t", b"[", b"{}\n", b"1,", b'"', b"<think> ", _ROW, b"\x00", b"\xff"))
    return _ROW + part * (rng.choice((1, 100, 30_000)) // len(part) + 1) + _ROW


def attack_compressed(rng: random.Random, folder: Path) -> None:
    """Read and tokenize the rows of a compressed file."""
    content = _repeated(rng)
    if rng.random() < 0.3:
        content = b"[" + content.replace(b"}\n", b"},") + b"{}]"
    path = folder / rng.choice(("rows.jsonl.gz", "rows.json.gz", "rows.csv.gz", "rows.jsonl.zst", "rows.json.zst"))
    packed = gzip.compress(content, 1) if path.suffix == ".gz" else zstandard.ZstdCompressor().compress(content)
    packed *= rng.choice((1, 1, 3))
    path.write_bytes(damage(packed, rng) if rng.random() < 0.5 else packed)
    tiny_encoder(str(path)).encode_and_count(open_reader(path).rows())


def attack_columns(rng: random.Random, folder: Path) -> None:
    """Read a Parquet or Arrow file whose rows share long strings."""
    num_rows, size = rng.choice((1, 3, 700)), rng.choice((1, 1000, 1 << 18))
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num_rows, "int32"), ["a" * size])
    lists = pyarrow.array([["a" * 10] * rng.choice((0, 1, 50))] * num_rows)
    table = pyarrow.table({"src": texts, rng.choice(("tgt", "note")): lists})
    path = folder / rng.choice(("rows.parquet", "rows.arrow"))
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression=rng.choice(("zstd", "gzip", "snappy", "none")))
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    if rng.random() < 0.5:
        content = path.read_bytes()
        end = rng.choice((0, len(content) // 2, max(0, len(content) - 300)))
        path.write_bytes(content[:end] + damage(content[end:], rng))
    for count, block in enumerate(open_reader(path).blocks()):
        list(block.rows())
        if count > 5:
            break


def attack_json(rng: random.Random, folder: Path) -> None:
    """Read a JSON file of many values, of one kind each."""
    part = rng.choice(("[]", "{}", "1", '"a"', "null", "[[]]", '{"a": 1}', "1e999", "-0", "9" * 400))
    inner = ",".join([part] * rng.choice((1, 1000, 20_000)))
    text = '{"x": [' + inner + "]}" if rng.random() < 0.7 else json.dumps({"y" * 1000: [1]}) + inner[:10]
    content = text.encode()
    path = folder / "config.json"
    path.write_bytes(damage(content, rng) if rng.random() < 0.4 else content)
    read_json_object(path)
