"""Frozen list of configuration keys: adding or removing a key requires an edit of known_keys.txt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddlenlp_ext.config.known_keys import KnownKeys, known_keys
from paddlenlp_ext.config.paddlenlp_flags import COMPAT_FLAGS
from paddlenlp_ext.config.run_config import SECTIONS
from paddlenlp_ext.peft.registry import peft_methods
from tests.common.scripts import ROOT, load_script
from tests.config.config_cases import SMALLEST, load, problems, write

FROZEN = Path(__file__).with_name("known_keys.txt")


def known() -> KnownKeys:
    return known_keys(peft_methods())


def test_known_keys_are_those_of_the_committed_list():
    frozen = FROZEN.read_text(encoding="utf-8").split()
    assert frozen == sorted(set(frozen)), "one spelling per line, sorted"
    now = set(known().keys)
    assert now - set(frozen) == set(), "new keys: add them to known_keys.txt"
    assert set(frozen) - now == set(), "removed keys: files that set them no longer load"


def test_known_keys_include_those_of_paddlenlps_documents():
    documented = (
        "model_name_or_path use_flash_attention flash_mask lora lora_path lora_rank rslora lora_plus_scale "
        "neftune neftune_noise_alpha vera vera_rank lokr lokr_rank use_long_sequence_strategies reft use_mora "
        "lora_use_mixer pissa strategy_type strategy_name rope_scaling_factor dataset_name_or_path "
        "zero_padding greedy_zero_padding src_length max_length lazy autoregressive use_pose_convert "
        "eval_with_do_generation top_k top_p output_dir per_device_train_batch_size "
        "gradient_accumulation_steps per_device_eval_batch_size num_train_epochs learning_rate warmup_steps "
        "warmup_ratio evaluation_strategy save_strategy fp16 bf16 fp16_opt_level do_train do_eval recompute "
        "refined_recompute tensor_parallel_degree pipeline_parallel_degree sharding_parallel_degree sharding "
        "optim layers position intervention_type rank act_fn add_bias dropout weight_quantize_algo flashmask"
    )
    names = documented.split()
    assert len(names) == 64
    assert set(names) <= set(known().keys)


def test_known_keys_have_one_line_of_help():
    for option in known().options.values():
        assert option.help and "\n" not in option.help, option.key


def test_known_keys_are_all_read_or_listed_as_compat():
    """Check that every key of a section is read by a package or the launcher, or is in the table of compat keys."""
    degrees = {f"{axis}_parallel_degree" for axis in ("tensor", "pipeline", "sharding", "expert")}
    # by the parser, adjustments, compute_dtype, complete_degrees, `patience`, `dev_sets` and the validation of flags
    read_in_config = {"sharding", "bf16", "fp16", *degrees, *COMPAT_FLAGS, "metric_for_best_model", "flash_mask"}
    read_in_config |= {"skip_data_intervals", "max_train_time"}  # `skipped_intervals`, `max_train_seconds`
    read_in_config |= {"amp_master_grad", "use_gradient_checkpointing"}  # `float32_gradients`, adjustments
    read_in_config |= {"rslora_plus", "early_stopping", "early_stopping_patience", "eval_dataset_path", "strategy_type"}
    read_in_config |= {"min_learning_rate", "lr_end"}  # `final_learning_rate`
    for_the_launcher = {"dry_run", "preview_data"}
    sources = [path for folder in ("paddlenlp_ext", "llm") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in sources if "config" not in path.relative_to(ROOT).parts
    )
    compat = set(known().compat)
    unread = {
        option.key
        for option in known().options.values()
        if option.section in SECTIONS and not re.search(rf"\.{option.attribute}\b", code)
    }
    assert unread - compat <= read_in_config | for_the_launcher


def test_configuration_page_matches_the_generated_tables():
    maker = load_script(ROOT / "docs" / "make_configuration.py")
    page = maker.PAGE.read_text(encoding="utf-8")
    assert maker.renew(page) == page, "run: python docs/make_configuration.py"
    assert all(f"`{spelling}`" in page for spelling in known().keys)


DECLARED = Path(__file__).with_name("paddlenlp_fields.txt")
"""Fields of the argument dataclasses of PaddleNLP 2.7.2, 2.8.1 and 3.0.0b4, and of its preference and RL programs."""


def test_known_keys_include_all_that_paddlenlp_declares():
    declared = DECLARED.read_text(encoding="utf-8").split()
    assert len(declared) >= 250
    assert set(declared) - set(known().keys) == set()


def test_compat_keys_have_a_sentence_and_accept_their_neutral_values(tmp_path):
    """Expect no message for neutral values, one for any other, and none of an unknown key."""
    table = known()
    entries = [entry for entry in table.compat.values() if entry.kind is not None and entry.key not in table.toolkit]
    for place in range(max(len(entry.neutral) for entry in entries)):
        neutral = {entry.key: entry.neutral[min(place, len(entry.neutral) - 1)] for entry in entries}
        assert load(write(tmp_path, SMALLEST | neutral)).notes == []
    other = {bool: True, int: 7, float: 0.7, str: "other", object: ["other"]}
    values = {
        entry.key: other[entry.kind] if other[entry.kind] not in entry.neutral else not entry.neutral[-1]
        for entry in entries
    }
    noted = [entry.key for entry in entries if entry.outcome == "no effect" or entry.needs is not None]
    notes = load(write(tmp_path, SMALLEST | {key: values[key] for key in noted})).notes
    assert sorted(note.partition(" has no effect: ")[0] for note in notes) == sorted(noted)
    refused = {entry.key: entry for entry in entries if entry.key not in noted}
    found = problems(write(tmp_path, SMALLEST | {key: values[key] for key in refused}))
    assert sorted(problem.key for problem in found) == sorted(refused)
    for problem in found:
        assert refused[problem.key].reason in problem.message
        assert "is not available yet" in problem.message or "is not used here" in problem.message


def test_compat_keys_of_a_feature_are_reported_by_its_switch_alone(tmp_path):
    quantization = {"do_ptq": True, "ptq_step": 16, "smooth": True, "quant_type": "W8A8", "fp8_type": ["e4m3", "e4m3"]}
    (found,) = problems(write(tmp_path, SMALLEST | quantization))
    assert found.key == "do_ptq" and "set weight_quantize_algo" in found.message
    (found,) = problems(write(tmp_path, SMALLEST | {"rl_algorithm": "grpo", "kl_loss_coeff": 0.1, "rollout_n": 8}))
    assert found.key == "rl_algorithm" and "pnx grpo" in found.message


@pytest.mark.parametrize(
    ("unknown", "suggested"),
    [
        ("quant_kind", None),
        ("lora_rnk", "lora_rank"),
        ("dora", "use_dora"),
    ],
)
def test_unknown_key_gets_a_suggestion_only_where_it_is_likely(tmp_path, unknown, suggested):
    (found,) = problems(write(tmp_path, SMALLEST | {unknown: 1}), methods=peft_methods())
    words = f"did you mean {suggested!r}?" if suggested else "--help lists the keys"
    assert words in found.message


def test_use_unsloth_is_accepted_with_a_note_about_what_does_the_same(tmp_path: Path):
    (note,) = load(write(tmp_path, SMALLEST | {"use_unsloth": True})).notes
    assert "fused kernels" in str(note) and "set recompute" in str(note)
    assert load(write(tmp_path, SMALLEST | {"use_unsloth": False})).notes == []


@pytest.mark.parametrize("value", ["yes", "unslothed"])
def test_use_gradient_checkpointing_with_an_unknown_value_is_an_error(tmp_path: Path, value: str):
    (problem,) = problems(write(tmp_path, SMALLEST | {"use_gradient_checkpointing": value}))
    assert problem.key == "use_gradient_checkpointing" and "set recompute" in str(problem)
