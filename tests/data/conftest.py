"""Fixtures of the data tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_ext.config.sections.data import DataConfig
from tests.data.tiny_tokenizers import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer(bos="<s>")


@pytest.fixture
def options(tmp_path: Path):
    """Return a function that builds a DataConfig for a folder."""

    def make(folder: Path | str, **changed):
        values = {
            "dataset_name_or_path": str(folder),
            "task_name": None,
            "src_length": 64,
            "max_length": 128,
            "truncation": "right",
            "bad_rows": "error",
            "chat_template": "none",
            "autoregressive": False,
            "data_cache_dir": str(tmp_path / "cache"),
        }
        return DataConfig(**(values | changed))

    return make
