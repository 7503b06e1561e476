"""Keys of other toolkits: other names of a key, values that stand for keys here, and errors that name a remedy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import pytest

from paddlenlp_ext.config import ConfigError, RunConfig, parser
from paddlenlp_ext.config.dataclass_options import Option
from paddlenlp_ext.config.known_keys import known_keys
from paddlenlp_ext.config.paddlenlp_keys import CompatKey
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, SECTIONS
from paddlenlp_ext.config.toolkit_keys import ANSWERED_KEYS, RENAMED_KEYS
from paddlenlp_ext.peft.registry import peft_methods
from tests.common.scripts import ROOT
from tests.config.config_cases import SMALLEST, load, problems, write

METHODS = peft_methods()
KNOWN = {tuple(sections): known_keys(METHODS, sections) for sections in (SECTIONS, PREFERENCE_SECTIONS)}
PREFERENCE = KNOWN[tuple(PREFERENCE_SECTIONS)]
EXPLAINED = [entry for entry in ANSWERED_KEYS if entry.outcome == "not here"]
TRANSLATED = [(entry, word, keys) for entry in ANSWERED_KEYS for word, keys in entry.sets.items()]
WORDS = {"dry_run", "adamw_8bit", "weight_only_int8"}
"""Words of remedies that are values, or arguments of the command line."""
NEEDED: dict[str, dict[str, Any]] = {
    "lazy": {"max_steps": 9},
    "early_stopping_patience": {"evaluation_strategy": "epoch"},
    "min_learning_rate": {"learning_rate": 1.0},
    **{key: {"lora": True} for key in ("pissa", "weight_quantize_algo")},
    **{key: {"bf16": True} for key in ("fp16_opt_level", "master_weight")},
}
"""Key -> further keys that a run with this key needs."""


@pytest.fixture(autouse=True)
def _collect_keys_once(monkeypatch):
    monkeypatch.setattr(parser, "known_keys", lambda _methods, sections: KNOWN[tuple(sections)])


def parse(values: Mapping[str, Any], sections: Mapping[str, type] = SECTIONS) -> RunConfig:
    """Return the configuration of the smallest run with some keys; null leaves out a key of the smallest run."""
    keys = {key: value for key, value in {**SMALLEST, "device": "cpu", **values}.items() if value is not None}
    return parser.run_config_from(keys, {}, METHODS, sections)


def outcome(values: Mapping[str, Any], sections: Mapping[str, type] = SECTIONS) -> RunConfig | list[str]:
    """Return the configuration without its notes, or the messages of its problems."""
    try:
        return dataclasses.replace(parse(values, sections), notes=[])
    except ConfigError as error:
        return [problem.message for problem in error.problems]


def sample(option: Option) -> Any:
    """Return a valid value of an option that is not its default."""
    if option.limits.choices is not None:
        return next(choice for choice in option.limits.choices if choice != option.default)
    if dict in option.kinds:
        return {"question": "src"}
    if str in option.kinds or tuple in option.kinds:
        return "word"
    if bool in option.kinds:
        return not option.default
    return 2 * abs(option.default or 2) if int in option.kinds else 0.25


def word_value(word: str) -> Any:
    """Return the JSON value of a word in the table."""
    return {"true": True, "false": False}.get(word, int(word) if word.isdigit() else word)


def refused_value(entry: CompatKey) -> Any:
    """Return a value that is neither neutral nor translated."""
    value = {bool: True, int: 7, float: 0.7, str: "other", object: ["other"], bool | str: "other"}[entry.kind]
    return not value if value in entry.neutral or entry.translation(value) is not None else value


FILES_OF_TOOLKITS = {
    "LLaMA-Factory": (
        {"finetuning_type": "lora", "lora_target": "all", "cutoff_len": 2048, "quantization_bit": 4, "packing": True}
        | {"preprocessing_num_workers": 2, "lr_scheduler_type": "cosine", "use_rslora": True, "flash_attn": "fa2"},
        {"lora": True, "max_length": 2048, "weight_quantize_algo": "nf4", "zero_padding": True}
        | {"greedy_zero_padding": True, "dataset_num_proc": 2, "lr_scheduler_type": "cosine", "rslora": True}
        | {"use_flash_attention": True},
    ),
    "ms-swift": (
        {"tuner_type": "lora", "quant_bits": 4, "truncation_strategy": "delete", "split_dataset_ratio": 0.0}
        | {"attn_impl": "flash_attention_2", "gradient_checkpointing": True, "bnb_4bit_use_double_quant": True},
        {"lora": True, "weight_quantize_algo": "nf4", "truncation": "drop", "use_flash_attention": True}
        | {"recompute": True, "weight_double_quant": True},
    ),
    "axolotl": (
        {"sequence_len": 4096, "micro_batch_size": 2, "num_epochs": 4, "lr_scheduler": "cosine", "sample_packing": True}
        | {"optimizer": "adamw_bnb_8bit", "train_on_inputs": False, "gradient_checkpointing": "unsloth", "lora_r": 16}
        | {"lora": True, "pad_to_sequence_len": True, "bfloat16": True, "excess_length_strategy": "raise"},
        {"max_length": 4096, "per_device_train_batch_size": 2, "num_train_epochs": 4, "lr_scheduler_type": "cosine"}
        | {"zero_padding": True, "greedy_zero_padding": True, "optim": "adamw_8bit", "recompute": True, "lora": True}
        | {"offload_recompute_inputs": True, "lora_rank": 16, "pad_to_max_length": True, "bf16": True}
        | {"truncation": "error"},
    ),
    "TRL and PEFT": (
        {"max_seq_length": 512, "max_prompt_length": 256, "use_peft": True, "r": 4, "bias": "lora_only"}
        | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "optim": "adamw_torch_fused", "use_cpu": True}
        | {"streaming": True, "max_steps": 5, "truncation_mode": "keep_end", "completion_only_loss": True},
        {"max_length": 512, "src_length": 256, "lora": True, "lora_rank": 4, "lora_trainable_bias": "adapted"}
        | {"weight_quantize_algo": "nf4", "optim": "adamw", "lazy": True, "max_steps": 5, "truncation": "left"},
    ),
}
"""Toolkit -> (keys as in its files, keys here that set the same)."""


@pytest.mark.parametrize("toolkit", FILES_OF_TOOLKITS)
def test_keys_of_a_toolkit_give_the_same_run_as_the_keys_here(toolkit):
    written, here = FILES_OF_TOOLKITS[toolkit]
    expected = outcome(here)
    assert isinstance(expected, RunConfig) and outcome(written) == expected


@pytest.mark.parametrize("here", sorted(set(RENAMED_KEYS.values())))
def test_renamed_key_gives_the_configuration_of_the_key_here(here):
    value = sample(PREFERENCE.options[here])
    needed = NEEDED.get(here, {})
    expected = [(sections, outcome({here: value} | needed, sections)) for sections in (SECTIONS, PREFERENCE_SECTIONS)]
    assert any(isinstance(config, RunConfig) for _, config in expected)
    for key in [key for key, name in RENAMED_KEYS.items() if name == here]:
        for sections, config in expected:
            found = outcome(({here: None} if here in SMALLEST else {}) | {key: value} | needed, sections)
            if isinstance(found, list):
                found = [re.sub(rf"\b{key}\b", here, message) for message in found]
            assert found == config, key


@pytest.mark.parametrize(
    ("entry", "word", "keys"), TRANSLATED, ids=lambda value: getattr(value, "key", str(value)[:30])
)
def test_translated_value_gives_the_configuration_of_the_keys_here(entry, word, keys):
    needed = {} if keys.get("lora") else NEEDED.get(next(iter(keys), ""), {})
    expected = outcome(keys | needed)
    assert outcome({entry.key: word_value(word)} | needed) == expected
    if keys and isinstance(expected, RunConfig):
        notes = parse({entry.key: word_value(word)} | needed).notes
        assert any(note.startswith(f"{entry.key} is read as {next(iter(keys))}: ") for note in notes)


@pytest.mark.parametrize("entry", EXPLAINED, ids=lambda entry: entry.key)
def test_explained_key_is_refused_with_its_remedy(entry):
    if entry.kind is bool and {"true", "false"} <= entry.sets.keys():
        return  # both values are translated
    messages = outcome({entry.key: refused_value(entry)})
    assert isinstance(messages, list) and any(
        message.startswith(f"{entry.key}: ") and entry.reason in message for message in messages
    )


@pytest.mark.parametrize("reason", sorted({entry.reason for entry in ANSWERED_KEYS}))
def test_remedy_names_existing_keys_files_and_values(reason):
    files = r"(?:llm|docs)/[\w/]+\.(?:py|md)"
    assert [path for path in re.findall(files, reason) if not (ROOT / path).exists()] == []
    words = re.sub(rf"{files}|\w+\.(?:json|png)|\{{.*?\}}", "", reason)
    named = set(re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", words))
    assert named - WORDS <= PREFERENCE.keys.keys()
    pairs = {key: word_value(value) for key, value in re.findall(r"\b([a-z0-9_]+): (\w+)", words)}
    for key, value in pairs.items():
        found = [outcome(NEEDED.get(key, {}) | {key: value}, sections) for sections in (SECTIONS, PREFERENCE_SECTIONS)]
        assert key in PREFERENCE.keys and any(isinstance(each, RunConfig) for each in found), found


def test_value_that_asks_for_what_happens_anyway_changes_nothing():
    plain = parse({})
    for entry in ANSWERED_KEYS:
        for value in entry.neutral[1:]:
            assert parse({entry.key: value}) == plain, f"{entry.key}: {value}"


def test_key_without_effect_is_noted():
    for entry in ANSWERED_KEYS:
        if entry.outcome == "no effect":
            (note,) = parse({entry.key: refused_value(entry)}).notes
            assert note.startswith(f"{entry.key} has no effect: {entry.reason}")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_length": 100, "cutoff_len": 200}, "cutoff_len and max_length are names of the same key"),
        ({"recompute": False, "gradient_checkpointing": True}, "gradient_checkpointing means recompute: true"),
        ({"lora": False, "finetuning_type": "lora"}, "finetuning_type and lora contradict each other"),
        ({"use_muon": True, "use_adam_mini": True}, "use_muon and use_adam_mini contradict each other"),
        ({"weight_quantize_algo": "fp4", "load_in_4bit": True}, "load_in_4bit and weight_quantize_algo contradict"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, dict) else "",
)
def test_toolkit_key_that_contradicts_another_key_is_refused(tmp_path, values, words):
    (found,) = problems(write(tmp_path, SMALLEST | values), methods=METHODS)
    assert words in found.message and found.line in (6, 7)


@pytest.mark.parametrize("key", ["use_lora", "use_rslora"])
def test_toolkit_switch_is_not_read_as_a_similar_method(tmp_path, key):
    config = load(write(tmp_path, SMALLEST | {"lora": True, key: True}), methods=METHODS)
    assert config.peft_switch == "lora" and config.peft.use_rslora is (key == "use_rslora")


def test_target_modules_gets_the_keys_of_methods_instead_of_a_guess(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"lora": True, "target_modules": ["q_proj"]}), methods=METHODS)
    assert "set the key of the adapter method, such as lora_target_modules" in found.message
    assert "did you mean" not in found.message


def test_typo_of_a_toolkit_key_gets_it_as_the_suggestion(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"cutof_len": 8}), methods=METHODS)
    assert "did you mean 'cutoff_len'?" in found.message


def test_toolkit_switch_needs_no_value_on_the_command_line(tmp_path):
    path = write(tmp_path, SMALLEST)
    assert load(path, "--gradient_checkpointing", methods=METHODS).train.recompute is True
    assert load("--no_gradient_checkpointing", path, methods=METHODS).train.recompute is False


def test_toolkit_keys_are_not_abbreviated():
    assert PREFERENCE.find("cutoff") == [] and PREFERENCE.find("cutoff_len") == ["max_length"]
