"""Built-in dataset `inflection`: correct answers, disjoint splits, the same rows on every load."""

from __future__ import annotations

import gzip
import importlib.util
import re
from collections import Counter

import pytest

from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.readers import inflection
from paddlenlp_ext.data.readers.inflection import NUM_ROWS, lexicon_path, read_inflection

QUESTION = re.compile(r'What is the ([a-z ]+) of the (verb|noun|adjective) "([a-z]{3,12})"\? Answer with one word\.')


@pytest.fixture(scope="module")
def splits():
    return {split: list(read_inflection(split)) for split in NUM_ROWS}


@pytest.fixture
def lexicon(tmp_path, monkeypatch):
    """Return a function that replaces the lexicon's lines and returns the questions and answers made of them."""

    def replace(*lines):
        path = tmp_path / "infl_lu.csv.gz"
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        monkeypatch.setattr(inflection, "lexicon_path", lambda: path)
        monkeypatch.setattr(inflection, "_split_of", lambda lemma: "train")
        return {(QUESTION.fullmatch(row.value["src"]).groups(), row.value["tgt"]) for row in read_inflection("train")}

    return replace


def test_inflection_rows_have_size_and_shape(splits):
    for split, rows in splits.items():
        assert len(rows) == NUM_ROWS[split]
        assert len({row.value["src"] for row in rows}) == len(rows)
        assert all(QUESTION.fullmatch(row.value["src"]) for row in rows)
        assert all(re.fullmatch("[a-z]+", row.value["tgt"]) for row in rows)


def test_inflection_splits_share_no_lemma(splits):
    lemmas = {split: {QUESTION.fullmatch(row.value["src"])[3] for row in rows} for split, rows in splits.items()}
    assert not lemmas["train"] & lemmas["dev"]


def test_inflection_first_rows_contain_every_kind(splits):
    """Check that 700 rows contain every kind of question, and many forms that are not the lemma plus an ending."""
    first = [(QUESTION.fullmatch(row.value["src"]), row.value["tgt"]) for row in splits["train"][:700]]
    kinds = Counter(match[1] for match, _ in first)
    assert len(kinds) == 7 and min(kinds.values()) >= 15
    changed = sum(not answer.startswith(match[3]) for match, answer in first)
    assert changed > 100


def test_inflection_answers_match_the_lexicon(splits):
    with gzip.open(lexicon_path(), "rt", encoding="utf-8") as lexicon:
        lines = lexicon.read().split("\n")
    for row in splits["dev"]:
        line = lines[row.location.line - 1]
        rest = line[row.location.column - 1 :]
        lemma = QUESTION.fullmatch(row.value["src"])[3]
        answer = row.value["tgt"]
        assert line.startswith(f"{lemma},")
        assert rest.split(",")[0] == answer or (rest.startswith(",") and line.split(",")[2] == answer)


def test_inflection_lexicon_lines_become_questions(lexicon):
    rows = lexicon("carry,verb,carried,,carrying,carries", "mouse,noun,mice", "big,adj,bigger,biggest")
    assert rows == {
        (("past tense", "verb", "carry"), "carried"),
        (("past participle", "verb", "carry"), "carried"),
        (("present participle", "verb", "carry"), "carrying"),
        (("third person singular", "verb", "carry"), "carries"),
        (("plural", "noun", "mouse"), "mice"),
        (("comparative", "adjective", "big"), "bigger"),
        (("superlative", "adjective", "big"), "biggest"),
    }


def test_inflection_forms_without_one_answer_are_skipped(lexicon):
    rows = lexicon(
        "go,verb,went,gone,going,goes",  # too short
        "Abbas,noun,Abbases",
        "re-treat,noun,re-treats",
        "uterus,noun,uteruses/uteri",
        "police,noun,police",
        "serene,adj,,",
        "again,adv,,",
        "transmogrifier,noun,transmogrifiers",  # too long
        "dream,verb,dreamt/dreamed,,dreaming,dreams",
        "child,noun,children",
        "see,verb,saw,seen,seeing,sees",
    )
    answers = {answer for _, answer in rows}
    assert answers >= {"saw", "seen", "children"}
    # Regular forms are at most as frequent as irregular ones.
    assert answers <= {"saw", "seen", "children", "seeing", "sees", "dreaming", "dreams"} and len(rows) == 6


def test_inflection_without_the_package_names_the_command(monkeypatch, options, tokenizer):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lemminflect" else find(name))
    with pytest.raises(ValueError, match="pip install lemminflect"):
        load_dataset(options("inflection"), "dev", tokenizer)


def test_load_dataset_inflection_has_rows_and_prompts(options, tokenizer):
    dataset = load_dataset(options("inflection"), "dev", tokenizer)
    assert len(dataset) == NUM_ROWS["dev"] and dataset.stats.num_untruncated == NUM_ROWS["dev"]
    prompts = list(dataset.prompts())
    for index in (0, 150, 399):
        ids, answer, question = prompts[index]
        assert tokenizer.decode(dataset[index].tokens) == f"{question}{answer}</s>"
        assert tokenizer.decode(ids) == question
    assert dataset.source(0)[0] == "infl_lu.csv.gz"
