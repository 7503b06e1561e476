"""Fixtures of the tests of the audit."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.config.sections.preference import PreferenceDataConfig
from paddlenlp_ext.data.audit.audit_splits import AuditedSplit, audit_splits
from paddlenlp_ext.data.preference.pair_dataset import open_pairs
from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder
from paddlenlp_ext.data.readers.dataset_files import open_splits
from paddlenlp_ext.data.templates.load import choose_template
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from tests.data.audit.rows import dumps


@pytest.fixture
def audit(options, tokenizer, tmp_path):
    """Return a function that audits rows by split under a template: "none", or one in Jinja."""

    def run(splits, template="none", num_processes=1, tokenizer=tokenizer, **changed):
        folder = tmp_path / "set"
        folder.mkdir(exist_ok=True)
        for split, rows in splits.items():
            (folder / f"{split}.jsonl").write_text("".join(dumps(row) + "\n" for row in rows))
        if template != "none":
            path = tmp_path / "template.jinja"
            path.write_text(template)
            template = str(path)
        config = options(folder, chat_template=template, **{"src_length": 256, "max_length": 512, **changed})
        loaded = choose_template(config, tokenizer)
        opened = []
        for split in splits:
            readers = open_splits((str(folder),), split)
            opened.append(AuditedSplit(split, readers, RowEncoder.from_config(config, loaded, readers)))
        return audit_splits(opened, "set", num_processes)

    return run


@pytest.fixture
def audit_pairs(options, tokenizer, tmp_path):
    """Return a function that audits rows of preference data."""

    def run(rows, **changed):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        common = {"src_length": 256, "max_length": 512, "chat_template": "none"}
        config = PreferenceDataConfig(train_dataset_path=str(path), **common, **changed)
        template = choose_template(config, tokenizer)
        return audit_splits(
            [AuditedSplit("train", *open_pairs(PreferenceEncoder, config, True, "train", template))], ""
        )

    return run
