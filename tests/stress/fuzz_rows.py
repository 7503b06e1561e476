"""Damaged data files, and rows with wrong values, in every format."""

from __future__ import annotations

import functools
import gzip
import json
import random
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.readers.dataset_files import open_reader
from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from tests.data.test_dataset import SAME_ROW
from tests.data.tiny_tokenizers import CHATML, make_tokenizer
from tests.stress.wrong_values import damage, mutate


@functools.cache
def tiny_encoder(file: str) -> RowEncoder:
    template = JinjaTemplate(CHATML, make_tokenizer(bos="<s>", eos="<|im_end|>"))
    return RowEncoder(template, LengthLimits(32, 64, "right"), False, (file,))


def attack(rng: random.Random, folder: Path) -> DataStats:
    """Read, render and tokenize some rows."""
    rows: list[Any] = [
        mutate(rng.choice(list(SAME_ROW.values())), rng, ("weight", "system", "tools")) for _ in range(3)
    ]
    if rng.random() < 0.2:
        rows.append(rng.choice((5, None, [], "x", [[[]]])))
    is_array = rng.random() < 0.4
    text = json.dumps(rows) if is_array else "".join(json.dumps(row) + "\n" for row in rows)
    if rng.random() < 0.02:
        text = text.replace(": ", ": " + "[" * 100_000, 1)
    content = text.encode()
    path = folder / rng.choice(("rows.json", "rows.jsonl", "rows.jsonl.gz"))
    if path.suffix == ".gz":
        content = gzip.compress(content, compresslevel=1)
    path.write_bytes(damage(content, rng) if rng.random() < 0.6 else content)
    _, stats = tiny_encoder(str(path)).encode_and_count(open_reader(path).rows())
    return stats
