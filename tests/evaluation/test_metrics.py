"""Extraction and scores of generated answers."""

from __future__ import annotations

import pytest

from paddlenlp_ext.evaluation.generation_task import cut_at
from paddlenlp_ext.evaluation.metrics import extract, f1, score_answers
from paddlenlp_ext.trainer.metrics.rouge_bleu import text_metrics


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("A or B? B.", r"[AB]", "B"),
        ("answer: 4 answer: (5)", r"answer: \(?(\d)", "5"),
        ("nothing", r"\d", None),
        ("x", r"x(y)?", ""),
        ("as it is", None, "as it is"),
    ],
)
def test_extract_returns_the_last_match_or_its_group(text, pattern, expected):
    assert extract(text, pattern) == expected


def test_score_answers_takes_the_best_reference_of_each_row():
    outputs, references = [" Paris\n", "the red car", None], [["Rome", "Paris"], ["Red"], ["x"]]
    values = {name: score_answers(name, outputs, references).values.tolist() for name in ("exact_match", "contains")}
    assert values == {"exact_match": [1, 0, 0], "contains": [1, 1, 0]}
    assert score_answers("f1", outputs, references).values.tolist() == pytest.approx([1, 0.5, 0])
    assert score_answers("number", ["it is 7.0", "8", None], [["#### 7"], ["9"], ["1"]]).values.tolist() == [1, 0, 0]


def test_score_answers_rouge_and_bleu_are_those_of_training():
    outputs, references = ["the cat sat on mats", "a dog ran away"], ["The cat sat on the mat.", "The dog ran off."]
    expected = text_metrics(outputs, references)
    for name in ("rouge1", "rouge2", "rougel", "bleu4", "exact_match"):
        assert score_answers(name, outputs, [[text] for text in references]).value == pytest.approx(expected[name])


def test_f1_counts_repeated_words_once_each():
    assert f1("the the cat", "the cat sat") == pytest.approx(2 * 2 / 6)
    assert f1("", "") == 0.0


def test_cut_at_ends_before_the_first_stop():
    assert cut_at("4\nQuestion: 5\n\n", ("\n\n", "\nQ")) == "4"
    assert cut_at("4", ()) == "4"
