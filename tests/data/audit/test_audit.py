"""Seeded faults are found at their places, and clean data has no findings."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddlenlp_ext.data.audit.audit_splits import TRAIN, AuditedSplit, audit_splits, check_account
from paddlenlp_ext.data.audit.audited_row import TokenizerInfo
from paddlenlp_ext.data.audit.block_auditor import BlockAuditor
from paddlenlp_ext.data.readers import json_lines
from paddlenlp_ext.data.readers.base import ParsedBlock
from paddlenlp_ext.data.readers.inflection import InflectionReader
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.data.templates.load import choose_template
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.utils.json_reader import Location
from tests.data import chat_rows
from tests.data.audit.rows import BEFORE, DEV_FAULTS, FAULTS, clean_row, text
from tests.data.templates.test_chat_templates import template_of
from tests.data.tiny_tokenizers import CHATML, LLAMA3, MARKED, MISTRAL, THINKING

COPIES = 3
NUM_CLEAN = 160
# A template that leaves out a sign, so that a part of some messages is lost.
LOSSY = CHATML.replace("message['content']", "message['content'] | replace('#', '')")


def places(report):
    """Return (check, split, line) of every finding."""
    return {
        (kind.name, split.name, place.location.line)
        for split in report.splits
        for kind, found in split.rows.findings.places.items()
        for place in found
    }


def seeded(clean, faults):
    """Return clean rows with faults among them, and (check, line) of each fault."""
    rows, expected = list(clean), []
    for number, (name, copy) in enumerate(itertools.product(faults, range(COPIES))):
        check, make = faults[name]
        rows.insert(len(BEFORE) + 30 + 2 * number, make(1000 + copy))
        expected.append((check, len(BEFORE) + 31 + 2 * number))
    return rows, expected


def test_audit_finds_every_seeded_fault_at_its_line_and_nothing_else(audit, monkeypatch):
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 9000)
    train, expected = seeded([*BEFORE, *(clean_row(seed) for seed in range(NUM_CLEAN))], FAULTS)
    dev, dev_expected = seeded((clean_row(seed) for seed in range(2000, 2060)), DEV_FAULTS)
    found = places(audit({"train": train, "dev": dev}, LOSSY, bad_rows="drop"))
    wanted = {(check, "train", line) for check, line in expected}
    wanted |= {(check, "dev", line) for check, line in dev_expected}
    assert len(wanted) == COPIES * (len(FAULTS) + len(DEV_FAULTS)) >= 60
    assert not wanted - found
    assert {place[1:] for place in found} == {place[1:] for place in wanted}


def test_audit_in_two_processes_gives_the_same_findings(audit, monkeypatch):
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 9000)
    train, _ = seeded((clean_row(seed) for seed in range(NUM_CLEAN)), FAULTS)
    one, two = (audit({"train": train}, LOSSY, processes).to_json() for processes in (1, 2))
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


def chat(seed):
    turns = [("user", text(4 * seed)), ("assistant", text(4 * seed + 1)), ("user", text(4 * seed + 2))]
    turns = [("system", "You are helpful."), *turns, ("assistant", "Grüße, 你好! " + text(4 * seed + 3))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize("template", ["none", CHATML, LLAMA3, MISTRAL, THINKING, MARKED])
def test_audit_of_clean_conversations_finds_nothing(audit, template):
    make = clean_row if template == MISTRAL else chat
    rows = [make(seed) for seed in range(60)]
    assert places(audit({"train": rows[:50], "dev": rows[50:]}, template)) == set()


FAMILIES = [(name, {}) for name in ("qwen2_5_marked", "qwen3", "llama3_2", "gptoss")]


@pytest.mark.parametrize(("name", "kwargs"), [*FAMILIES, ("smollm3", {"mask_reasoning": True})])
def test_audit_of_conversations_under_a_familys_template_finds_only_what_it_refuses(name, kwargs):
    rows = [
        SourceRow(Location("rows", line, 1), value, json.dumps(value))
        for line, value in enumerate(chat_rows.ROWS.values(), start=1)
    ]
    template = template_of(name, **kwargs)
    encoder = RowEncoder(template, LengthLimits(4096, 8192, "right"), False, ("rows",))
    audited = BlockAuditor(encoder, TokenizerInfo.of(template))(ParsedBlock((), 1.0, tuple(rows))).rows
    found = {kind.name: [place.location.line for place in places] for kind, places in audited.findings.places.items()}
    assert len(found.pop("invalid row", [])) == audited.stats.num_dropped
    assert found == {"question without answer": [1 + list(chat_rows.ROWS).index("question_last")]}


def test_audit_of_rows_with_one_long_system_prompt_finds_nothing(audit):
    system = text(1, 30)
    rows = [{"src": text(seed), "tgt": text(seed + 50), "system": system} for seed in range(12)]
    assert places(audit({"train": rows[:10], "dev": rows[10:]}, max_length=4096, src_length=4096)) == set()


def test_audit_of_inflection_finds_nothing(options, tokenizer):
    config, reader = options("inflection"), InflectionReader("dev")
    encoder = RowEncoder.from_config(config, choose_template(config, tokenizer), [reader])
    report = audit_splits([AuditedSplit("dev", [reader], encoder)], "inflection", 1)
    assert report.num_rows == 400 and places(report) == set()


def test_audit_of_clean_plain_text_finds_nothing(audit):
    rows = [{"text": text(seed, 20)} for seed in range(20)]
    report = audit({"train": rows}, autoregressive=True, max_length=128)
    assert places(report) == set() and report.splits[0].rows.num_examples > 60


def test_audit_of_pairs_finds_the_fault_of_an_answer(audit_pairs):
    rows = [{"prompt": text(3 * s), "chosen": text(3 * s + 1), "rejected": text(3 * s + 2)} for s in range(30)]
    assert places(audit_pairs(rows)) == set()
    rows[7]["rejected"] += "</s>"
    rows[9]["chosen"] += " CafÃ©"
    rows[11]["chosen"] = text(1, 60)
    found = places(audit_pairs(rows))
    assert found == {
        ("special token in the text", "train", 8),
        ("wrong encoding", "train", 10),
        ("target mostly cut away", "train", 12),
    }


def test_audit_of_a_template_without_end_token_finds_every_row(audit):
    rows = [clean_row(seed) for seed in range(5)]
    template = CHATML.replace("<|im_end|>", "")
    found = places(audit({"train": rows}, template))
    assert found == {("missing end token", "train", line) for line in range(1, 6)}


def test_audit_of_a_template_with_two_begin_tokens_finds_every_row(audit):
    template = LLAMA3.replace("{{ bos_token }}", "{{ bos_token + bos_token }}")
    found = places(audit({"train": [clean_row(seed) for seed in range(3)]}, template))
    assert found == {("doubled begin token", "train", line) for line in (1, 2, 3)}


def test_audit_of_text_outside_the_vocabulary_names_it(audit):
    vocabulary = {word: index for index, word in enumerate(["<unk>", "</s>", "red", "plum", "lime"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    rows = [{"src": "red plum", "tgt": "plum red"}, {"src": "red kiwi", "tgt": "lime red"}]
    report = audit({"train": rows}, tokenizer=words)
    assert places(report) == {("unknown token", "train", 2), ("text lost", "train", 2)}


def test_audit_locates_the_message_of_a_finding(audit):
    row = chat(1)
    row["messages"][3]["content"] += " Ã©"
    report = audit({"train": [chat(0), row]}, CHATML)
    (found,) = (place for places in report.splits[0].rows.findings.places.values() for place in places)
    line = Path(found.location.file).read_text().splitlines()[1]
    message = line[found.location.column - 1 :]
    assert message.startswith('{"role": "user"') and found.excerpt.endswith("⟦Ã©⟧")


def test_audit_account_adds_up_and_counts_lost_targets(audit):
    rows = [clean_row(seed) for seed in range(20)]
    whole = audit({"train": rows}, max_length=4096, src_length=2048).splits[0].rows.stats
    short = audit({"train": rows}, max_length=160, src_length=60).splits[0].rows.stats
    dropped = audit({"train": rows}, max_length=160, src_length=60, truncation="drop").splits[0].rows.stats
    assert short.num_truncated > 10
    for stats in (short, dropped):
        stats.check()
        assert stats.num_target_tokens + stats.num_lost_target_tokens == whole.num_target_tokens
    assert short.num_tokens + short.num_truncated_tokens == whole.num_tokens
    assert dropped.num_dropped > 10 and dropped.num_truncated == 0


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1", "chosen": "2", "rejected": "3</s>"},
        {"chosen": "\n\nHuman: 1\n\nAssistant: 2", "rejected": "\n\nHuman: 1\n\nAssistant: 3</s>"},
        {"instruction": "1", "chosen": "2", "rejected": "3</s>"},
        {
            "conversations": [{"from": "human", "value": "1"}],
            "chosen": {"from": "gpt", "value": "2"},
            "rejected": {"from": "gpt", "value": "3</s>"},
        },
        {
            "messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
            "rejected_response": "3</s>",
        },
        {
            "input": {"messages": [{"role": "user", "content": "1"}]},
            "preferred_output": [{"role": "assistant", "content": "2"}],
            "non_preferred_output": [{"role": "assistant", "content": "3</s>"}],
        },
        {"instruction": "1", "output": "3</s>", "kto_tag": False},
    ],
    ids=lambda row: " ".join(row),
)
def test_audit_of_pairs_reads_the_formats_of_other_toolkits(row, audit_pairs):
    assert ("special token in the text", "train", 1) in places(audit_pairs([row]))


def test_audit_counts_the_targets_of_rows_dropped_as_too_long(audit, audit_pairs):
    texts = [{"text": "1" * 50}, {"text": "2" * 200}]
    stats = audit({"train": texts}, autoregressive=True, max_length=100, truncation="drop").splits[0].rows.stats
    assert stats.num_lost_target_tokens == 201 and stats.num_dropped == 1  # with an end token
    pairs = [
        {"prompt": "1", "chosen": "2" * 300, "rejected": "3" * 400},
        {"prompt": "1", "chosen": "2", "rejected": "3"},
    ]
    stats = audit_pairs(pairs, truncation="drop").splits[0].rows.stats
    assert stats.num_lost_target_tokens == 702 and stats.num_target_tokens == 4


def test_check_account_adds_a_finding_for_each_number_that_differs(audit):
    report = audit({"train": [clean_row(0), clean_row(1)]})
    check_account(report.splits[0], {"num_read": 2, "num_tokens": 1})
    (kind,) = report.splits[0].rows.findings.counts
    (place,) = report.splits[0].rows.findings.places[kind]
    assert kind.severity == "error" and place.excerpt.startswith("num_tokens: ") and "1 in training" in place.excerpt


def test_audit_of_a_sample_reads_the_beginning_of_every_file(options, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 500)
    readers = []
    for name, count in (("a", 1000), ("b", 1000), ("c", 3)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f'{{"src": "<br>", "tgt": "{name}"}}\n' * count)
        readers.append(json_lines.JsonLinesReader(path))
    config = options(tmp_path)
    encoder = RowEncoder.from_config(config, choose_template(config, tokenizer), readers)
    report = audit_splits([AuditedSplit(TRAIN, readers, encoder, max_rows=150)], "abc", 1)
    assert 103 <= report.num_rows < 150 and report.splits[0].is_sample
    (duplicates,) = (
        number for kind, number in report.splits[0].rows.findings.counts.items() if kind.name == "duplicate"
    )
    assert duplicates == report.num_rows - 3  # each file repeats one row


def test_block_auditor_result_does_not_grow_with_the_findings(tokenizer, options, tmp_path, monkeypatch):
    monkeypatch.setattr("paddlenlp_ext.data.audit.findings.MAX_PLACES", 5)
    path = tmp_path / "train.jsonl"
    path.write_text('{"src": "<br> a", "tgt": "b\\ufffd"}\n' * 40)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 400)
    config, reader = options(tmp_path), json_lines.JsonLinesReader(path)
    encoder = RowEncoder.from_config(config, choose_template(config, tokenizer), [reader])
    report = audit_splits([AuditedSplit(TRAIN, [reader], encoder)], "a", 1)
    findings = report.splits[0].rows.findings
    assert {len(found) for found in findings.places.values()} == {5}
    assert sorted(findings.counts.values()) == [39, 40, 40]


def test_audit_lengths_are_those_before_truncation(audit):
    rows = [{"src": "1" * 20, "tgt": "2" * length} for length in (10, 200)]
    (split,) = audit({"train": rows}, max_length=100, src_length=50).splits
    assert sorted(split.rows.lengths) == [31, 221]  # with an end token
    assert split.percentile(0.5) == 31 and split.percentile(1.0) == 221
    width, bins = split.length_bins(100)
    assert len(bins) * width >= 200 and bins[31 // width] == 1 and bins[-1] == 1 and sum(bins) == 2
    assert np.sum(split.rows.target_shares) == 2
