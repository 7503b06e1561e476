"""ROUGE, BLEU-4 and exact match of generated texts."""

from __future__ import annotations

import pytest

from paddlenlp_ext.trainer.metrics import rouge_bleu as module
from paddlenlp_ext.trainer.metrics.rouge_bleu import WordTokenizer, text_metrics


def test_text_metrics_rouge_equals_hand_computed_values():
    # Reference: 6 words. Output: 5 words, 4 of them shared; 3 shared bigrams; longest common subsequence 4.
    metrics = text_metrics(["the cat sat on mats"], ["The cat sat on the mat."])
    assert metrics["rouge1"] == pytest.approx(2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6))
    assert metrics["rouge2"] == pytest.approx(2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5))
    assert metrics["rougel"] == pytest.approx(2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6))
    assert metrics["exact_match"] == 0.0


def test_text_metrics_identical_texts_score_one_in_any_script():
    texts = ["The quick brown fox jumps.", "今天天气很好，我们去公园散步。", "Это простая проверка слов."]
    for text in texts:
        metrics = text_metrics([f" {text}\n"], [text])
        assert metrics == pytest.approx(dict.fromkeys(metrics, 1.0)), text


def test_text_metrics_chinese_is_scored_by_characters():
    metrics = text_metrics(["今天很热"], ["今天很冷"])
    assert metrics["rouge1"] == pytest.approx(0.75)
    assert metrics["rouge2"] == pytest.approx(2 / 3)
    assert 0 < text_metrics(["今天天气很好"], ["今天天气很热"])["bleu4"] < 1


def test_word_tokenizer_splits_words_of_any_script():
    assert WordTokenizer().tokenize("Don't 说 hello世界, naïve_2!") == [
        "don", "t", "说", "hello", "世", "界", "naïve_2",
    ]  # fmt: skip


def test_text_metrics_missing_library_names_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"needs the package rouge_score; run: pip install 'paddlenlp-ext\[metrics\]'"):
        text_metrics(["a"], ["a"])


def test_text_metrics_different_lengths_are_an_error():
    with pytest.raises(ValueError, match="got 1 outputs and 2 references"):
        text_metrics(["a"], ["a", "b"])
