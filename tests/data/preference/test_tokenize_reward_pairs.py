"""Rows of reward models: positions, ends of answers, margins, limits, and rows that are only scored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.config.sections.reward import RewardConfig
from paddlenlp_ext.data.collate import build_collate
from paddlenlp_ext.data.preference.collate_reward_pairs import collate_reward_pairs
from paddlenlp_ext.data.preference.pair_dataset import load_preference_dataset, load_reward_dataset
from paddlenlp_ext.data.preference.tokenize_reward_pairs import ScoringEncoder
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.rows.errors import DataError
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.labels import IGNORED_LABEL as NO
from tests.data.tiny_tokenizers import TEMPLATES

PAIR = {"prompt": "2 + 2?", "chosen": "vier", "rejected": "the answer is five"}
RANKED = {"src": ["a", "2 + 2?"], "tgt": ["b"], "response": ["five", "vier"], "sort": [0, 1], "margin": -1.5}


def make_row(prompt, chosen, rejected, **options) -> TokenizedPair:
    tokens = np.array([*prompt, *chosen, *rejected], np.int32)
    starts = (len(prompt), len(prompt) + len(chosen))
    loss_mask = np.arange(len(tokens)) >= len(prompt)
    return TokenizedPair(tokens, loss_mask, 0, starts, (True, False), scores_last_tokens=True, **options)


@pytest.fixture
def template_file(tmp_path):
    (tmp_path / "chatml.jinja").write_text(TEMPLATES["chatml"][0], "utf-8")
    return str(tmp_path / "chatml.jinja")


@pytest.fixture
def load(tmp_path, tokenizer, template_file):
    def load(*rows, share_prompt=True, **options):
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
        keys = {"train_dataset_path": str(tmp_path / "rows.jsonl"), "data_cache_dir": str(tmp_path / "cache")}
        config = PreferenceDataConfig(**{**keys, "chat_template": template_file, **options})
        return load_reward_dataset(config, RewardConfig(share_prompt=share_prompt), "train", tokenizer)

    return load


# -- positions --------------------------------------------------------------------------------------------------------
def test_collate_reward_pairs_has_the_last_token_of_each_answer():
    row, short = make_row([1, 2, 3], [10, 11], [20], margin=0.5), make_row([7], [30], [40, 41])
    batch = collate_reward_pairs([[row], [short]])
    assert batch.input_ids.tolist() == [[1, 2, 3, 10, 11, 3, 20, 7, 30, 7, 40, 41]]
    assert batch.labels.tolist() == [[NO, NO, 10, 11, NO, 20, NO, 30, NO, 40, 41, NO]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 0, 1, 2]]
    assert batch.document_lengths == ((2, 3, 2, 2, 3),) and batch.document_parents == ((None, 0, 0, None, None),)
    assert batch.scored.tolist() == [4, 6, 8, 11] and batch.margins.tolist() == [0.5, 0.0]
    assert batch.input_ids.size == row.length + short.length == batch.num_tokens


def test_collate_reward_pairs_counts_positions_over_batch_rows_and_skips_padding():
    separate = make_row([1, 2], [10, 99], [20, 99, 99], share_prompt=False)
    batch = collate_reward_pairs([[separate], [separate]], pad_to_length=11, pad_token_id=99, unscored_token_id=99)
    assert batch.input_ids[0].tolist() == [1, 2, 10, 99, 1, 2, 20, 99, 99, 99, 99]
    assert batch.scored.tolist() == [2, 6, 13, 17] and batch.document_parents is None
    assert collate_reward_pairs([[separate]]).scored.tolist() == [3, 8]


@pytest.mark.parametrize("share_prompt", [True, False])
def test_load_reward_dataset_stores_rows_as_they_are_batched(load, tokenizer, share_prompt):
    rows = load(PAIR, RANKED, share_prompt=share_prompt)
    assert rows.lengths.tolist() == [row.length for row in (rows[0], rows[1])]
    assert [rows[0].margin, rows[1].margin] == [0.0, -1.5] and rows.stats.unknown_fields == {}
    for row, answers in ((rows[0], ["vier", "the answer is five"]), (rows[1], ["vier", "five"])):
        for text, (tokens, mask) in zip(answers, row.answers, strict=True):
            assert tokenizer.decode(tokens) == f"{text}<|im_end|>\n"  # as the template ends
            assert mask.tolist() == [True] * (len(tokens) - 1) + [False]
    batch = build_collate(rows, PreferenceDataConfig(), 0, 400, collate_packs=collate_reward_pairs)([[0], [1]])
    ends = batch.input_ids.ravel()[batch.scored]
    assert len(ends) == 4 and {tokenizer.decode([token]) for token in ends} == {"\n"}


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?")])
def test_load_reward_dataset_with_damaged_margins_tokenizes_again(load, damage):
    rows = load(PAIR, RANKED)
    damage(rows.cache_folder / "values.npy")
    assert [row.margin for row in load(PAIR, RANKED).head(2)] == [0.0, -1.5]
    assert np.load(rows.cache_folder / "values.npy").tolist() == [[0.0], [-1.5]]


def test_load_reward_dataset_and_load_preference_dataset_have_separate_caches(load, tmp_path, tokenizer, template_file):
    rewards = load(PAIR)
    keys = {"train_dataset_path": str(tmp_path / "rows.jsonl"), "data_cache_dir": str(tmp_path / "cache")}
    config = PreferenceDataConfig(**keys, chat_template=template_file)
    pairs = load_preference_dataset(config, PreferenceConfig(), "train", tokenizer)
    assert pairs.cache_folder.parent == rewards.cache_folder.parent and pairs.cache_folder != rewards.cache_folder


# -- limits and errors ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share_prompt", [True, False])
def test_load_reward_dataset_limits_the_positions_of_a_row(load, share_prompt):
    complete = load(PAIR, share_prompt=share_prompt).lengths[0]
    exact, shorter = (load(PAIR, share_prompt=share_prompt, max_length=int(complete) - less) for less in (0, 1))
    assert exact.lengths[0] == complete and exact.stats.num_truncated == 0
    assert shorter.lengths[0] == complete - 1 and shorter.stats.num_truncated == 1


def test_load_reward_dataset_reports_rows_that_it_cannot_compare(load):
    rated = {"prompt": "2 + 2?", "completion": "five", "label": False}
    with pytest.raises(DataError) as caught:
        load(PAIR, rated, {**PAIR, "margin": "1"}, {**PAIR, "margin": True}, {**PAIR, "margin": float("inf")})
    first, *others = caught.value.problems
    assert (
        "has one answer, but a reward model needs a chosen and a rejected answer" in first.message
        and first.location.line == 2
    )
    assert [(problem.location.line, "margin is not a number" in problem.message) for problem in others] == [
        (3, True),
        (4, True),
        (5, True),
    ]


# -- scoring ----------------------------------------------------------------------------------------------------------
def test_scoring_encoder_reads_preference_data_and_rows_of_fine_tuning(tokenizer, template_file):
    rated = {"prompt": "2 + 2?", "completion": "five", "label": False}
    chat = {"messages": [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "abcd", strict=False)]}
    rows = [PAIR, RANKED, rated, {"src": "2 + 2?", "tgt": "vier"}, chat]
    encoder = ScoringEncoder(load_template(template_file, tokenizer), LengthLimits(90, 90, "error"), False, ())
    pairs = encoder.pairs(SourceRow(Location("rows", n, 1), row) for n, row in enumerate(rows, start=1))
    texts = [[tokenizer.decode(tokens) for tokens, _ in pair.answers] for pair in pairs]
    end = "<|im_end|>\n"
    expected = [["vier", "the answer is five"], ["vier", "five"], ["five"], ["vier"], ["d"]]
    assert texts == [[text + end for text in answers] for answers in expected]
    assert [pair.row_index for pair in pairs] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"1 invalid row; fix them:\n  rows:7"):
        encoder.pairs([SourceRow(Location("rows", 7, 1), {"src": "a"})])
