"""Preference data from files to batches: tokens of the template, limits, cache, statistics and errors."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.data.collate import build_collate
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.preference.collate_pairs import collate_pairs
from paddlenlp_ext.data.preference.pair_dataset import load_preference_dataset
from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder
from paddlenlp_ext.data.preview import preview_rows, style_row
from paddlenlp_ext.data.readers.base import ParsedBlock
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import DataError
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.data.templates.plain import PlainTemplate
from paddlenlp_ext.data.tokenization import token_cache as token_cache_module
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.utils.json_reader import Location
from tests.data.tiny_tokenizers import TEMPLATES

PAIR = {"prompt": "2 + 2?", "chosen": "vier", "rejected": "the answer is five"}
TWO_TURNS = {"src": ["a", "2 + 2?"], "tgt": ["b"], "response": ["five", "vier"], "sort": [0, 1]}
RATED = {"prompt": "2 + 2?", "completion": "five", "label": False}


@pytest.fixture
def load(tmp_path, tokenizer):
    """Return a function that writes rows to a file and loads them."""

    def load(*rows, loss_type="sigmoid", share_prompt=True, name="train.jsonl", **options):
        file = tmp_path / name
        file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")
        config = PreferenceDataConfig(
            **{
                "train_dataset_path": str(file),
                "data_cache_dir": str(tmp_path / "cache"),
                "chat_template": str(tmp_path / "chatml.jinja"),
                **options,
            }
        )
        (tmp_path / "chatml.jinja").write_text(TEMPLATES["chatml"][0], "utf-8")
        return load_preference_dataset(
            config, PreferenceConfig(loss_type=loss_type, share_prompt=share_prompt), "train", tokenizer
        )

    return load


def test_load_preference_dataset_tokens_are_those_of_the_template(load, tokenizer, tmp_path):
    rows = load(PAIR, TWO_TURNS)
    template = load_template(str(tmp_path / "chatml.jinja"), tokenizer)
    for row, history, question in ((rows[0], (), "2 + 2?"), (rows[1], (("a", "b"),), "2 + 2?")):
        assert row.prompt.tolist() == template.encode_prompt(Conversation.asking(question, history))
        answers = ["vier", "five" if history else "the answer is five"]
        for text, (tokens, mask) in zip(answers, row.answers, strict=True):
            assert tokenizer.decode(tokens) == f"{text}<|im_end|>" and mask.all()
            conversation = Conversation.from_turns(None, (*history, (question, text)), frozenset(range(len(history))))
            assert template.encode(conversation)[0][0] == [*row.prompt, *tokens]
    assert rows.lengths.tolist() == [row.length for row in rows]
    assert rows.num_answers.tolist() == [2, 2]
    assert rows.source(1) == (str(tmp_path / "train.jsonl"), 2)


def page_rows():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "preference.md").read_text("utf-8")
    return [json.loads(line) for line in page.split("```json\n")[1].split("```")[0].splitlines()]


@pytest.mark.parametrize("row", page_rows(), ids=lambda row: " ".join(row))
def test_load_preference_dataset_of_each_row_of_the_page_splits_prompt_and_answers(row, load, tokenizer):
    (pair,) = load(row, loss_type="kto")
    prompt = tokenizer.decode(pair.prompt)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    answers = [tokenizer.decode(tokens) for tokens, _ in pair.answers]
    if row.get("chosen") == "The sky is blue.":
        assert "<|im_start|>user\nThe sky is<|im_end|>" in prompt and answers == [
            " blue.<|im_end|>",
            " green.<|im_end|>",
        ]
        return
    assert re.search(r"<\|im_start\|>user\n(Add\.\n)?2 \+ 2\??<\|im_end\|>\n<\|im_start\|>assistant\n$", prompt), prompt
    assert answers == (["4<|im_end|>", "5<|im_end|>"] if len(answers) == 2 else ["5<|im_end|>"])
    assert all(mask.all() for _, mask in pair.answers)
    assert style_row(pair, tokenizer, marked=True).plain.count("⟦") == len(answers)
    assert pair.is_desirable == ((True, False) if len(answers) == 2 else (False,))


def test_load_preference_dataset_as_separate_rows_counts_the_prompt_twice(load):
    shared, separate = load(PAIR)[0], load(PAIR, share_prompt=False)
    assert separate[0].tokens.tolist() == shared.tokens.tolist()
    assert separate.lengths.tolist() == [separate[0].length] == [shared.length + len(shared.prompt) - 1]


def test_load_preference_dataset_reads_rated_answers_for_kto_only(load, tmp_path):
    rows = load(PAIR, RATED, loss_type="kto")
    assert rows.num_answers.tolist() == [2, 1] and rows[1].is_desirable == (False,)
    assert rows[0].is_desirable == (True, False)
    assert rows[1].length == len(rows[1].tokens) - 1 == rows.lengths[1]
    with pytest.raises(ValueError, match=r"train\.jsonl:2: the row has one answer, but loss_type: ipo compares two"):
        load(PAIR, RATED, loss_type="ipo")


def test_load_preference_dataset_builds_once_and_keys_the_cache_by_its_options(load, monkeypatch):
    calls = []
    real = token_cache_module.tokenize
    monkeypatch.setattr(token_cache_module, "tokenize", lambda *a: calls.append(1) or real(*a))
    first, second = load(PAIR), load(PAIR)
    assert len(calls) == 1 and first[0].tokens.tolist() == second[0].tokens.tolist()
    assert first.cache_folder == second.cache_folder
    assert load(PAIR, max_length=100).cache_folder != first.cache_folder
    assert load(PAIR, share_prompt=False).cache_folder != first.cache_folder
    assert load(PAIR, TWO_TURNS).cache_folder != first.cache_folder
    assert len(calls) == 4


def test_load_preference_dataset_reports_all_invalid_rows_with_their_locations(load):
    damaged = (PAIR, '{"prompt": "q", "chosen": "a", "rejected": ""}', "{", RATED | {"label": 3})
    with pytest.raises(DataError) as caught:
        load(*damaged)
    found = [(problem.location.line, problem.location.column, problem.reason) for problem in caught.value.problems]
    assert found == [(2, 44, "empty target"), (3, 2, "broken JSON"), (4, 53, "wrong type")]
    dropped = load(*damaged, bad_rows="drop").stats
    assert dropped.dropped == {"empty target": 1, "broken JSON": 1, "wrong type": 1}
    assert (dropped.num_read, dropped.num_untruncated) == (4, 1)


def test_load_preference_dataset_counts_unknown_fields(load, tmp_path):
    stats = load(PAIR | {"score_chosen": 3}, PAIR | {"score_chosen": 4}).stats
    assert stats.unknown_fields == {str(tmp_path / "train.jsonl"): {"score_chosen": 2}}
    assert stats.num_target_tokens == sum(len(tokens) for tokens, _ in load(PAIR, PAIR)[0].answers) * 2


def test_load_preference_dataset_from_a_folder_reads_its_splits(load, tmp_path, tokenizer):
    load(PAIR)
    load(PAIR, TWO_TURNS, name="dev.jsonl")
    config = PreferenceDataConfig(
        dataset_name_or_path=str(tmp_path), data_cache_dir=str(tmp_path / "cache"), chat_template="none"
    )
    sizes = [len(load_preference_dataset(config, PreferenceConfig(), split, tokenizer)) for split in ("train", "dev")]
    assert sizes == [1, 2]
    with pytest.raises(ValueError, match="dataset_name_or_path: not set"):
        load_preference_dataset(PreferenceDataConfig(), PreferenceConfig(), "train", tokenizer)


LONG = {"prompt": "verb " * 40, "chosen": "carry " * 10, "rejected": "carried"}


def test_load_preference_dataset_shortens_the_prompt_but_not_the_template(load, tokenizer):
    row = load(LONG, src_length=30)[0]
    text = tokenizer.decode(row.prompt)
    assert len(row.prompt) <= 30 and text.startswith("<|im_start|>system\nYou are helpful.<|im_end|>")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and "verb verb" in text
    assert [len(tokens) for tokens, _ in row.answers] == [len(tokens) for tokens, _ in load(LONG)[0].answers]


def test_load_preference_dataset_shortens_the_longest_answer_from_the_right(load, tokenizer):
    full = load(LONG)[0]
    lengths = [len(tokens) for tokens, _ in full.answers]
    room = len(full.prompt) + sum(lengths) - 2
    rows = load(LONG, max_length=room)
    assert [len(tokens) for tokens, _ in rows[0].answers] == [lengths[0] - 2, lengths[1]]
    assert tokenizer.decode(rows[0].answers[1][0]).endswith("<|im_end|>")
    assert rows.stats.num_truncated == 1 and rows.stats.num_truncated_tokens == 2
    tight = load(LONG, max_length=len(full.prompt) + 5)[0]
    assert [len(tokens) for tokens, _ in tight.answers] == [len(tight.answers[0][0]), len(tight.answers[1][0])]
    assert sum(len(tokens) for tokens, _ in tight.answers) == 5


def test_load_preference_dataset_as_separate_rows_limits_both_prompts(load):
    row = load(PAIR)[0]
    limit = len(row.tokens) + len(row.prompt) - 1
    assert load(PAIR, max_length=limit).stats.num_truncated == 0
    assert load(PAIR, max_length=limit, share_prompt=False).stats.num_truncated_tokens == 1
    assert load(PAIR, max_length=limit + 1, share_prompt=False).stats.num_truncated == 0


def test_load_preference_dataset_shares_what_a_template_writes_before_both_answers(load, tmp_path, tokenizer):
    """Check a template whose text before the answer depends on it: the common part is the prompt."""
    template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ 'A' + message['content'][0] + ':' }}{% generation %}{{ message['content'] + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ 'Q:' + message['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
    )
    (tmp_path / "odd.jinja").write_text(template, "utf-8")
    row = load(PAIR, chat_template=str(tmp_path / "odd.jinja"))[0]
    assert tokenizer.decode(row.prompt) == "Q:2 + 2?A"
    for answer, (tokens, mask) in zip(("vier", "the answer is five"), row.answers, strict=True):
        assert tokenizer.decode(tokens) == f"{answer[0]}:{answer}<|im_end|>"
        assert tokenizer.decode(tokens[mask]) == f"{answer}<|im_end|>"


def test_load_preference_dataset_from_the_left_keeps_answers(load):
    full = load(LONG)[0]
    row = load(LONG, max_length=len(full.tokens) - 7, truncation="left")[0]
    assert len(row.tokens) <= len(full.tokens) - 7
    for kept, whole in zip(row.answers, full.answers, strict=True):
        assert kept[0].tolist() == whole[0].tolist()
    with pytest.raises(DataError, match="no room"):
        load(LONG, max_length=sum(len(tokens) for tokens, _ in full.answers), truncation="left")


def test_load_preference_dataset_drops_the_oldest_turns_of_a_long_prompt(load, tokenizer):
    turns = {"src": ["verb " * 40, "2 + 2?"], "tgt": ["vier"], "response": ["a", "b"], "sort": [1, 0]}
    text = tokenizer.decode(load(turns, src_length=40)[0].prompt)
    assert "verb" not in text and "vier" not in text and "2 + 2?" in text


EMPTY_THOUGHT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_load_preference_dataset_keeps_what_a_template_writes_after_a_shortened_prompt(load, tokenizer, tmp_path):
    """Check a template that writes an empty thought, which is not learned, before the answer."""
    (tmp_path / "thought.jinja").write_text(EMPTY_THOUGHT, "utf-8")
    full, row = (load(LONG, chat_template=str(tmp_path / "thought.jinja"), src_length=limit)[0] for limit in (2000, 60))
    assert len(row.prompt) <= 60 < len(full.prompt)
    for text in (tokenizer.decode(full.prompt), tokenizer.decode(row.prompt)):
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert [tokens.tolist() for tokens, _ in row.answers] == [tokens.tolist() for tokens, _ in full.answers]


@pytest.mark.parametrize("truncation", ["drop", "error"])
def test_load_preference_dataset_with_a_long_row_drops_or_refuses_it(load, truncation):
    if truncation == "error":
        with pytest.raises(DataError, match=r":2:1: too long: .* a prompt of \d+ tokens, more than max_prompt_len 50"):
            load(PAIR, LONG, max_length=60, src_length=50, truncation=truncation)
        return
    rows = load(PAIR, LONG, max_length=60, src_length=50, truncation=truncation)
    assert len(rows) == 1 and rows.stats.dropped == {"too long": 1}


def test_preference_packs_hold_each_answer_once(load):
    """Check batches of a packing plan: rows of the plan, capacity, and targets."""
    rows = load(PAIR, TWO_TURNS, RATED, PAIR, loss_type="kto", max_length=140, src_length=100)
    plan = PackingPlan(rows.lengths, batch_size=2, packing="greedy", capacity=140)
    config = PreferenceDataConfig(max_length=140)
    collate_packs = partial(collate_pairs, reference_logps=np.arange(8.0).reshape(4, 2))
    collate = build_collate(rows, config, 0, 400, collate_packs=collate_packs)
    batches = [collate(micro_batch) for micro_batch in plan.epoch(0)]
    assert sorted(index for batch in batches for index in batch.row_indices) == [0, 1, 2, 3]
    for batch in batches:
        answers = [tokens.tolist() for index in batch.row_indices for tokens, _ in rows[index].answers]
        found = [batch.labels[batch.answer_index == number].tolist() for number in range(batch.num_answers)]
        assert found == answers and batch.mismatched is None
        assert len(batch.reference_logps) == batch.num_answers
    with pytest.raises(ValueError, match=r"train\.jsonl:1: row 0 has the token id"):
        build_collate(rows, config, 0, 5, collate_packs=collate_packs)([[0]])


def test_preference_encoder_of_invalid_rows_keeps_the_columns_of_answers(tokenizer):
    """Check a block without a valid row, after which others are appended to the same file."""
    encoder = PreferenceEncoder(PlainTemplate(tokenizer), LengthLimits(40, 60, "right"), False, ("a.jsonl",))
    rows = [SourceRow(Location("a.jsonl", line, 1), row) for line, row in enumerate(({}, PAIR), start=1)]
    empty, full = (encoder(ParsedBlock((), 1.0, (row,))) for row in rows)
    assert empty.arrays.answers.shape == (0, 3) and full.arrays.answers.shape == (1, 3)
    assert (empty.stats.num_dropped, full.stats.num_untruncated) == (1, 1)


def test_preview_names_the_answers_of_a_row(load, tokenizer):
    output = io.StringIO()
    preview_rows(load(PAIR, RATED, loss_type="kto"), tokenizer, 2, Console(file=output, width=200))
    view = output.getvalue()
    assert "prompt:\n<|im_start|>system" in view
    assert "chosen:\n⟦vier<|im_end|>⟧\nrejected:\n⟦the answer is five<|im_end|>⟧" in view
    assert "bad:\n⟦five<|im_end|>⟧" in view


def test_preference_collate_with_padding_gives_rows_of_max_length(load):
    rows = load(PAIR, PAIR, max_length=70, src_length=50, loss_type="kto")
    config = PreferenceDataConfig(max_length=70, pad_to_max_length=True)
    collate_packs = partial(collate_pairs, with_mismatched=True)
    batch = build_collate(rows, config, 0, 400, collate_packs=collate_packs)([[0], [1]])
    assert batch.input_ids.shape == (2, 70)
    assert batch.mismatched.num_answers == 4
