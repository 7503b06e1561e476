"""Near-duplicates: estimated similarity against the exact one, candidates, and matches between splits."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from paddlenlp_ext.data.audit import duplicates
from paddlenlp_ext.data.audit.duplicates import RECORD, TRAIN_ROWS, DuplicateFinder, record_of

WORDS = ["".join(letters) for letters in itertools.product("bcdfghklmnprst", repeat=3)]


def text_of(seed, count):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def changed(text, positions):
    words = text.split()
    for position in positions:
        words[position] = "a" + "".join(chr(97 + int(digit)) for digit in str(position))
    return " ".join(words)


def jaccard(a, b):
    sets = [set(zip(w, w[1:], w[2:], strict=False)) for w in (a.split(), b.split())]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def find(texts_by_split, prompts=None):
    """Return (row, other row, similarity, only the prompt) of all duplicates among texts."""
    with DuplicateFinder() as finder:
        for split, texts in enumerate(texts_by_split):
            records = [
                record_of(text, prompts[split][line] if prompts else "", 0, line) for line, text in enumerate(texts)
            ]
            finder.append(np.array(records, RECORD), split)
        return [(each.row, each.other, each.similarity, each.same_prompt) for each in finder.duplicates()]


@pytest.mark.parametrize("num_changed", [0, 5, 15, 40, 80])
def test_signature_estimates_the_jaccard_similarity_of_word_triples(num_changed):
    errors = []
    for seed in range(40):
        text = text_of(seed, 300)
        other = changed(text, random.Random(seed).sample(range(300), num_changed))
        first, second = (record_of(each, "", 0, 1)["signature"] for each in (text, other))
        errors.append(np.mean(first == second) - jaccard(text, other))
    assert abs(np.mean(errors)) < 0.02  # 128 minima: one estimate has a standard deviation of at most 0.045
    assert np.max(np.abs(errors)) < 0.17


def test_duplicate_finder_finds_similar_rows_and_no_others():
    texts = [text_of(seed, 200) for seed in range(300)]
    similar = [changed(texts[seed], [50, 150]) for seed in range(100)]  # similarity 0.94
    alike = [changed(texts[seed], range(0, 200, 8)) for seed in range(100, 200)]  # similarity 0.46
    found = find([texts + similar + alike])
    assert [(row, other) for row, other, _, _ in found] == [(300 + seed, seed) for seed in range(100)]
    assert all(0.85 <= similarity < 1 for _, _, similarity, _ in found)


def test_duplicate_finder_equal_words_are_duplicates_of_the_first_row():
    text = text_of(1, 4)
    assert find([[text, "a b c", f"{text.upper()}!", text]]) == [(2, 0, 1.0, False), (3, 0, 1.0, False)]
    chinese = "今天天气很好，我们去公园散步吧"
    assert find([[chinese, chinese + "。", chinese[::-1]]]) == [(1, 0, 1.0, False)]


def test_duplicate_finder_short_rows_that_differ_are_no_duplicates():
    assert find([["one two three four", "one two three five"]]) == []


def test_duplicate_finder_compares_dev_rows_with_training_rows_first():
    text = text_of(1, 30)
    assert find([[text_of(2, 30), text], [text, text]]) == [(2, 1, 1.0, False), (3, 1, 1.0, False)]


def test_duplicate_finder_names_dev_rows_with_a_prompt_of_train():
    prompts = [[text_of(1, 12), text_of(2, 12)], [text_of(2, 12), text_of(3, 12)]]
    texts = [[f"{prompt} {split}{index}" for index, prompt in enumerate(own)] for split, own in enumerate(prompts)]
    texts[1][0] = prompts[1][0] + text_of(9, 40)
    assert find(texts, prompts) == [(2, 1, 1.0, True)]
    assert find([["what is it one two"], ["what is it three four"]], [["what is it"], ["what is it"]]) == []
    many = [[text_of(1, 12)] * 20, [text_of(1, 12)]]
    texts = [[text_of(100 * split + index, 30) for index in range(len(own))] for split, own in enumerate(many)]
    assert find(texts, many) == []  # such as an instruction that all rows share


def test_duplicate_finder_stops_collecting_at_its_maximum(monkeypatch):
    monkeypatch.setattr(duplicates, "MAX_ROWS", 5)
    with DuplicateFinder() as finder:
        for _ in range(3):
            finder.append(np.array([record_of(text_of(1, 9), "", 0, 1)] * 2, RECORD), TRAIN_ROWS)
        assert finder.num_rows == 5 == len(finder.records())


def test_duplicate_finder_without_rows_finds_nothing():
    assert find([[]]) == []
