"""Preview of rows, which highlights exactly the target tokens."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.preview import TARGET_STYLES, preview_rows, style_row
from tests.data.tiny_tokenizers import CHATML


@pytest.fixture
def dataset(options, tokenizer, tmp_path):
    template = tmp_path / "chatml.jinja"
    template.write_text(CHATML)
    folder = tmp_path / "set [1]"
    folder.mkdir()
    rows = [{"src": ["vier", "[bold]Grüße"], "tgt": ["vier\n", "你好"]}, {"src": "a", "tgt": "b"}]
    (folder / "train.json").write_text("\n".join(map(json.dumps, rows)))
    return load_dataset(options(folder, chat_template=str(template)), "train", tokenizer)


def test_style_row_styles_target_spans(dataset, tokenizer):
    text = style_row(dataset[0], tokenizer)
    target_text = "".join(text.plain[span.start : span.end] for span in text.spans if span.style in TARGET_STYLES)
    assert target_text == "vier⏎\n<|im_end|>你好<|im_end|>"
    assert text.plain.replace("⏎", "") == tokenizer.decode(dataset[0].tokens)


def test_preview_rows_without_colors_marks_target_spans(dataset, tokenizer):
    output = io.StringIO()
    preview_rows(dataset, tokenizer, 5, Console(file=output, width=40))
    view = output.getvalue()
    assert "⟦vier⏎\n<|im_end|>⟧" in view and "⟦你好<|im_end|>⟧" in view
    assert "[bold]Grüße" in view
    assert "set [1]/train.json:1" in view and "set [1]/train.json:2" in view
    assert view.count("--- row") == 2 and "legend" in view


def test_preview_rows_prints_at_most_num_rows(dataset, tokenizer):
    output = io.StringIO()
    preview_rows(dataset, tokenizer, 1, Console(file=output))
    assert output.getvalue().count("--- row") == 1
