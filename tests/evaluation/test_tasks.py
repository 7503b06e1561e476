"""Kinds of tasks: rows, token ids at the border of prompt and continuation, and scores of a tiny model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.evaluation.build_tasks import build_tasks
from paddlenlp_ext.evaluation.log_likelihood import Continuation, log_likelihoods
from paddlenlp_ext.evaluation.perplexity_task import rolling_windows
from paddlenlp_ext.evaluation.prompt_encoder import PromptEncoder, split_pair
from paddlenlp_ext.evaluation.task_options import TaskOptions
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.evaluation.tiny_model import CONFIG, byte_tokenizer


@pytest.fixture(scope="module")
def encoder():
    tokenizer = byte_tokenizer()
    return PromptEncoder(tokenizer, load_template(None, tokenizer), 64)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_config(CONFIG, seed=1)


def open_task(tmp_path, rows, **keys):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_tasks([TaskOptions(data_file=str(file), **keys)])[0]


def measure(task, model, encoder):
    encoded, counted = task.encode(encoder), []
    measured = task.measure(model, encoded, encoder, 2, counted.append)
    assert sum(counted) == task.num_units(encoded)
    return measured


def test_split_pair_keeps_the_number_of_ids_of_the_prompt(encoder):
    """Check tokens that merge across the border as lm-evaluation-harness does: "a" and "b" become one token."""
    tokens = encoder.tokenizer.convert_ids_to_tokens
    prompt, rest = split_pair(encoder.text, "xa", "bok")
    assert (tokens(prompt), tokens(rest)) == (["x", "a"], ["ok"])
    prompt, rest = split_pair(encoder.text, "x ", "yok")
    assert (tokens(prompt), tokens(rest)) == (["x"], ["Ġy", "ok"])


def test_prompt_encoder_continuation_of_an_empty_prompt_follows_the_start_token(encoder):
    start = encoder.tokenizer.bos_token_id
    assert encoder.continuation("", "ok").prompt == [start]
    blank = encoder.continuation(" ", "y")
    assert encoder.tokenizer.convert_ids_to_tokens([*blank.prompt, *blank.tokens]) == ["<s>", "Ġy"]


def test_prompt_encoder_chat_separates_prompt_and_choice(encoder, tmp_path):
    task = open_task(tmp_path, [{"q": "a", "choices": ["b", "ok"], "answer": 0}], task="multiple_choice", prompt="{q}?")
    ((first, second),) = task.encode(encoder)
    assert encoder.tokenizer.decode(first.prompt) == "<s>user\na?</s>\n<s>assistant\n"
    assert first.prompt == second.prompt
    assert encoder.tokenizer.convert_ids_to_tokens(second.tokens) == ["ok"]


def test_prompt_encoder_chat_beyond_max_length_keeps_the_template(encoder, tmp_path):
    """Check that room for the choice is taken from the question, not from the beginning of the template."""
    row = {"q": "q" * 80, "choices": ["b", "c" * 20], "answer": 0}
    for each in open_task(tmp_path, [row], task="multiple_choice", prompt="{q}").encode(encoder)[0]:
        text = encoder.tokenizer.decode(each.prompt)
        assert text.startswith("<s>user\nqq") and text.endswith("q</s>\n<s>assistant\n")
        assert len(each.prompt) + len(each.tokens) == 65


@pytest.mark.parametrize("answer", [1, "B", "green", [1], ["green"]])
def test_multiple_choice_compares_log_likelihoods_and_those_per_character(model, encoder, tmp_path, answer):
    """Compare the choices with the greatest values, computed one by one."""
    row = {"q": "Grass is", "choices": ["r", "green", "blue!!"], "answer": answer}
    task = open_task(tmp_path, [row], task="multiple_choice", prompt="{q}", chat=False)
    values = []
    for choice in row["choices"]:
        ids = encoder.text(f"Grass is {choice}")
        pair = Continuation(ids[:8], ids[8:])
        values.append(log_likelihoods(model, [pair], batch_size=1, max_length=64)[0].logprob)
    best, normalized = np.argmax(values), np.argmax(np.array(values) / [1, 5, 6])
    assert best != normalized
    measured = measure(task, model, encoder)
    assert measured.outputs == [row["choices"][best]]
    assert measured.scores["acc"].value == float(best == 1)
    assert measured.scores["acc_norm"].value == float(normalized == 1)
    assert task.references == ["green"]
    by_length = open_task(tmp_path, [row], task="multiple_choice", prompt="{q}", chat=False, metrics=["acc_norm"])
    assert measure(by_length, model, encoder).outputs == [row["choices"][normalized]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": "a", "choices": ["b"], "answer": 0}, "rows.jsonl:1:23: invalid choices: the row has 1 choices"),
        ({"q": "a", "choices": ["b", ""], "answer": 0}, "choice 1 is empty"),
        ({"q": "a", "choices": ["b", "c"], "answer": 2}, "answer 2 does not match any of the 2 choices"),
        ({"q": "a", "choices": ["b", "c"], "answer": "x"}, "answer 'x' does not match any of the 2 choices"),
        ({"q": "a", "choices": ["b", "c"], "answer": True}, "answer is a boolean; write a string or a number"),
        ({"q": "a", "choices": ["b", "c"]}, "missing key: .*add 'answer'"),
        ({"choices": ["b", "c"], "answer": 0}, "missing key: .*add 'q'"),
        ({"q": [], "choices": ["b", "c"], "answer": 0}, "rows.jsonl:1:7: wrong type: q is a list; write a string"),
    ],
)
def test_multiple_choice_rows_with_faults_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        open_task(tmp_path, [row], task="multiple_choice", prompt="{q}")


def test_multiple_choice_with_a_choice_beyond_max_length_names_the_row(encoder, tmp_path):
    rows = [{"q": "a", "choices": [text, "b"], "answer": 1} for text in ("c", "c" * 70)]
    task = open_task(tmp_path, rows, task="multiple_choice", prompt="{q}", name="quiz")
    with pytest.raises(ValueError, match="quiz: row 2: a continuation has 70 tokens, more than max_length 64"):
        task.encode(encoder)


def test_generation_scores_the_models_own_answers(model, encoder, tmp_path):
    """Take the answers of the model as references, except for the last row."""
    questions = ["a", "xyz", "b?"]
    prompts = [encoder.text(question) for question in questions]
    own = [encoder.decode(ids) for ids in model.generate(prompts, max_new_tokens=5)]
    rows = [{"q": question, "answer": [text, "other"]} for question, text in zip(questions, own, strict=True)]
    rows[2]["answer"] = ["nothing of this"]
    keys = {"task": "generation", "prompt": "{q}", "chat": False, "max_new_tokens": 5, "metrics": ["exact_match", "f1"]}
    task = open_task(tmp_path, rows, **keys)
    measured = measure(task, model, encoder)
    assert measured.outputs == own
    assert measured.scores["exact_match"].values.tolist() == [1, 1, 0]


def test_generation_of_training_rows_asks_through_the_template(encoder, tmp_path):
    task = open_task(tmp_path, [{"src": "a?", "tgt": "It is #### 4"}], task="generation", metrics=["number"])
    assert (task.prompts, task.references) == (["a?"], ["It is #### 4"])
    (ids,) = task.encode(PromptEncoder(encoder.tokenizer, encoder.template, 300))
    assert encoder.tokenizer.decode(ids) == "<s>user\na?</s>\n<s>assistant\n"
    with pytest.raises(ValueError, match="max_new_tokens 256 leaves no room for a prompt in 64 tokens"):
        task.encode(encoder)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"src": "a"}, "the row has no reference answer"),
        ({"src": "a", "tgt": "four"}, "a reference answer contains no number"),
        ({"src": "a", "tgt": "of 7 apples: four"}, "a reference answer contains no number"),
    ],
)
def test_generation_rows_without_an_answer_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        open_task(tmp_path, [row], task="generation", metrics=["number"], pattern=": (.*)")


@pytest.mark.parametrize("answer", [" ", [], ["a", ""]])
def test_generation_rows_with_a_blank_answer_are_named(tmp_path, answer):
    """Check the answers that every text contains."""
    with pytest.raises(ValueError, match="answer is empty; write an answer"):
        open_task(tmp_path, [{"q": "a", "answer": answer}], task="generation", prompt="{q}", metrics=["contains"])


def test_generation_without_the_library_of_a_metric_raises_before_it_generates(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ValueError, match="ROUGE or BLEU needs the package sacrebleu"):
        open_task(tmp_path, [{"src": "a", "tgt": "b"}], task="generation", metrics=["bleu4"])


def test_rolling_windows_predict_each_token_once():
    windows = list(rolling_windows(list(range(1, 9)), 0, 3))
    assert windows == [Continuation([0], [1, 2, 3]), Continuation([3], [4, 5, 6]), Continuation([5, 6], [7, 8])]
    assert all(len(each.prompt) + len(each.tokens) <= 4 for each in windows)
    assert list(rolling_windows([1, 2], 0, 3)) == [Continuation([0], [1, 2])]


def test_perplexity_of_texts_is_that_of_their_windows(model, encoder, tmp_path):
    texts = ["ok, " * 30, "short"]
    task = open_task(
        tmp_path, [{"t": text} for text in texts], task="perplexity", text="t", metrics=["perplexity", "bits_per_byte"]
    )
    measured = measure(task, model, encoder)
    losses, tokens = [], []
    for text in texts:
        ids = encoder.text(text)
        windows = list(rolling_windows(ids, encoder.tokenizer.bos_token_id, 64))
        losses.append(-sum(each.logprob for each in log_likelihoods(model, windows, batch_size=1, max_length=64)))
        tokens.append(len(ids))
    assert measured.scores["perplexity"].value == pytest.approx(np.exp(sum(losses) / sum(tokens)), rel=1e-5)
    assert measured.scores["bits_per_byte"].value == pytest.approx(sum(losses) / np.log(2) / 125, rel=1e-5)


def test_perplexity_of_a_text_file_counts_windows(model, encoder, tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("ok, " * 60)
    (task,) = build_tasks([TaskOptions(task="perplexity", data_file=str(file))])
    assert len(measure(task, model, encoder).scores["perplexity"].values) == 3


def test_bits_per_byte_of_a_text_file_counts_the_bytes_of_the_text(model, encoder, tmp_path):
    """Check characters of two bytes at the border of windows, which decode to the three bytes of U+FFFD."""
    file = tmp_path / "book.txt"
    file.write_text("a" + "é" * 100, encoding="utf-8")
    (task,) = build_tasks([TaskOptions(task="perplexity", data_file=str(file), metrics=["bits_per_byte"])])
    scores = measure(task, model, encoder).scores["bits_per_byte"]
    assert len(scores.weights) == 4 and scores.weights.sum() == pytest.approx(201)


def test_scores_of_a_text_file_in_other_windows_are_not_compared(model, encoder, tmp_path):
    """Check as many windows at other places, which another tokenizer may have."""
    found = []
    for text in ("é" + "a" * 79, "é" + "a" * 79, "a" * 79 + "é"):
        (tmp_path / "book.txt").write_text(text, encoding="utf-8")
        (task,) = build_tasks([TaskOptions(task="perplexity", data_file=str(tmp_path / "book.txt"))])
        found.append(measure(task, model, replace(encoder, max_length=40)).scores["perplexity"])
    first, same, other = found
    assert len(first.values) == len(other.values) == 3
    assert same.compare(first, 0) is not None and other.compare(first, 0) is None


def test_perplexity_of_training_rows_counts_their_target_tokens(model, encoder, tmp_path):
    rows = [{"src": "a?", "tgt": "ok"}, {"src": ["b", "c"], "tgt": ["d", "e!"]}]
    measured = measure(open_task(tmp_path, rows, task="perplexity"), model, encoder)
    scores = measured.scores["perplexity"]
    assert scores.weights.tolist() == [2, 5]  # "ok" and the end token; two answers, each with one
    prompt = encoder.tokenizer("<s>user\na?</s>\n<s>assistant\n").input_ids
    pair = Continuation(prompt, encoder.tokenizer("ok</s>").input_ids)
    assert scores.values[0] == pytest.approx(-log_likelihoods(model, [pair], batch_size=1, max_length=64)[0].logprob)


@pytest.mark.parametrize(
    ("content", "keys", "message"),
    [
        (b" \n", {}, "the file is empty"),
        (b"\xff", {}, "byte 0 is not valid UTF-8"),
        (b"a", {"text": "t"}, "a .txt file has no rows; remove text and limit"),
    ],
)
def test_perplexity_of_a_text_file_with_faults_raises(tmp_path, content, keys, message):
    file = tmp_path / "book.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build_tasks([TaskOptions(task="perplexity", data_file=str(file), **keys)])
