"""Rules about long-sequence strategies and PoSE, and PaddleNLP's spellings of a strategy."""

from __future__ import annotations

import pytest

from tests.config.config_cases import SMALLEST, load, problems, write

ON = {"use_long_sequence_strategies": True}
YARN = {**ON, "strategy_name": "YaRNScalingRotaryEmbedding", "rope_scaling_factor": 4}
ALIBI = {**ON, "strategy_name": "AttentionWithLinearBias", "rope_scaling_factor": 4}
MODULE = "paddlenlp.transformers.long_sequence_strategies"


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        (ON, "strategy_name", "use_long_sequence_strategies needs strategy_name"),
        (
            {**YARN, "strategy_type": "attention_strategies"},
            "strategy_type",
            "belongs to strategy_type embedding_strategies, not attention_strategies",
        ),
        ({**YARN, "strategy_parameters": [1]}, "strategy_parameters", "expected an object"),
        ({**YARN, "rope_scaling_factor": 0.5}, "rope_scaling_factor", "at least 1"),
        ({**YARN, "strategy_name": "YarnRotary"}, "strategy_name", "is not one of"),
        ({**ALIBI, "use_pose_convert": True}, "use_pose_convert", "cannot be used with strategy_name"),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_long_context_rules_report_the_contradiction(tmp_path, values, key, words):
    (found,) = problems(write(tmp_path, SMALLEST | values))
    assert found.key == key and words in found.message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**YARN, "rope_scaling_factor": 1}, "use_long_sequence_strategies has no effect with rope_scaling_factor: 1"),
        ({**YARN, "use_long_sequence_strategies": False}, "has no effect: use_long_sequence_strategies is false"),
    ],
)
def test_long_context_rules_note_keys_without_effect(tmp_path, values, words):
    notes = load(write(tmp_path, SMALLEST | values)).notes
    assert notes and all("strategy" in note or "rope_scaling_factor" in note for note in notes)
    assert any(words in note for note in notes)


def test_long_context_rules_note_that_flash_mask_only_packs(tmp_path):
    notes = load(write(tmp_path, SMALLEST | {**ALIBI, "flash_mask": True})).notes
    assert any("the FlashMask kernel does not support the biases" in note for note in notes)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("yarn", "YaRNScalingRotaryEmbedding"),
        (f"{MODULE}.embedding_strategies.LinearScalingRotaryEmbedding", "LinearScalingRotaryEmbedding"),
        (f"{MODULE}.attention_strategies.AttentionWithLinearBias", "AttentionWithLinearBias"),
    ],
)
def test_strategy_spellings_are_read(tmp_path, written, read):
    kind = "attention_strategies" if "Bias" in read else "embedding_strategies"
    values = {**YARN, "strategy_name": written, "strategy_type": f"{MODULE}.{kind}"}
    model = load(write(tmp_path, SMALLEST | values)).model
    assert (model.strategy_name, model.strategy_type) == (read, kind)


def test_strategy_parameters_on_the_command_line_are_json(tmp_path):
    config = load(write(tmp_path, SMALLEST | YARN), "--strategy_parameters", '{"beta_fast": 16, "truncate": false}')
    assert config.model.strategy_parameters == {"beta_fast": 16, "truncate": False}
