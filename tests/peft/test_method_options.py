"""Options that the adapter configs advertise: each is a field, appears in the help text, and is accepted."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.peft.config import BIASES, PeftConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.scripts import ROOT

METHODS = [method for _, method in PEFT_METHODS.items()]
VALUES: dict[str, Any] = {
    "path": "folder",
    "base_model_name_or_path": "base",
    "bias": BIASES[-1],
    "exclude_modules": ("q_proj",),
    "modules_to_save": ("norm",),
    "saved_embeddings": ("model.embed_tokens",),
    "target_modules": ("v_proj",),
    "target_parameters": ("mlp.gate.weight",),
    "feedforward_modules": ("up_proj",),
    "alpha_pattern": {"q_proj": 3.0},
    "trainable_token_indices": (3, 7),
    "token_indices": (3, 7),
    "total_step": 9,
    "init_r": 10,
    "encoder_num_layers": 3,
    "prompt_tuning_init_text": "red",
    "tokenizer_name_or_path": "folder",
    "layers": "0,1",
    "position": "f2",
    "boft_block_size": 2,
    "boft_block_num": 2,
    "boft_n_butterfly_factor": 2,
    "encoder_hidden_size": 8,
    "oft_block_size": 8,
    "num_cayley_neumann_terms": 3,
    "layers_pattern": "layers",
}
"""Valid value of an option that differs from its default, for options whose type does not suggest one."""
NEEDED: dict[str, dict[str, Any]] = {
    "encoder_num_layers": {"encoder_reparameterization_type": "lstm"},
    "encoder_dropout": {"encoder_reparameterization_type": "lstm"},
    "prompt_tuning_init_text": {"prompt_tuning_init": "text"},
    "add_bias": {"intervention_type": "NoreftIntervention"},
    "layers_pattern": {"layers_to_transform": 0},
}
"""Other options that an option depends on."""
FIELDS = [(method, field.name) for method in METHODS for field in dataclasses.fields(method)]
ALL_FIELDS = pytest.mark.parametrize(
    ("method", "name"), FIELDS, ids=[f"{method.__name__}.{name}" for method, name in FIELDS]
)


def other_value(method: type, name: str) -> Any:
    """Return a valid value of an option that differs from its default."""
    field = next(field for field in dataclasses.fields(method) if field.name == name)
    if name == "rank_pattern":
        return {"q_proj.lora_E": [True] * 12} if method.__name__ == "AdaLoRAConfig" else {"q_proj": 2}
    if name == "alpha" and method.__name__ == "VeRAConfig":
        return 8  # documented: it must equal the rank
    if name in VALUES:
        return VALUES[name]
    details = field.metadata.get("paddlenlp_ext.option")
    choices = details["limits"].choices if details else None
    if choices:
        return next(choice for choice in choices if choice not in (field.default, "text"))
    if isinstance(field.default, bool):
        return not field.default
    return 2 if field.default is None or isinstance(field.default, int) else field.default / 2 + 0.1


@ALL_FIELDS
def test_every_advertised_option_is_accepted_and_changes_the_config(method: type, name: str):
    value = other_value(method, name)
    config = method(**{name: value, **NEEDED.get(name, {})})
    field = next(field for field in dataclasses.fields(method) if field.name == name)
    if "variant" in field.metadata:
        assert type(config) is PEFT_METHODS.get(name)
        return
    assert type(config) is method
    if name in {"layers_to_transform", "layers_pattern"}:  # stored as patterns in target_modules
        assert config.target_modules != method(**NEEDED.get(name, {})).target_modules
        return
    assert getattr(config, name) == value
    if field.compare and (method.__name__, name) != ("VeRAConfig", "alpha"):  # its only value is the default
        assert config != method()


@pytest.mark.parametrize("method", METHODS)
def test_signature_help_and_fields_of_a_config_agree(method: type):
    fields = [field.name for field in dataclasses.fields(method)]
    assert list(inspect.signature(method).parameters) == fields
    text = pydoc.plain(pydoc.render_doc(method))
    assert all(f"{name}:" in text for name in fields)
    assert not [name for name in fields if name.startswith("_")]


@pytest.mark.parametrize("method", METHODS)
def test_docstring_examples_of_a_config_are_right(method: type):
    names = vars(sys.modules[method.__module__])
    examples = [test for test in doctest.DocTestFinder().find(method, globs=dict(names)) if test.examples]
    assert examples, f"{method.__name__} has no example"
    assert doctest.DocTestRunner().run(examples[0]).failed == 0


def test_lora_config_has_the_fields_of_peft():
    fields = {field.name for field in dataclasses.fields(LoRAConfig)}
    assert fields >= {
        *("r", "lora_alpha", "lora_dropout", "bias", "target_modules", "exclude_modules", "modules_to_save"),
        *("use_rslora", "use_dora", "init_lora_weights", "rank_pattern", "alpha_pattern", "lora_bias"),
        *("target_parameters", "trainable_token_indices", "ensure_weight_tying", "base_model_name_or_path"),
    }
    assert not {"lora_bias", "target_parameters", "init_lora_weights", "initial_factors", "use_dora"} & {
        field.name for field in dataclasses.fields(PiSSAConfig)
    }


def test_type_checker_and_editors_see_the_fields_of_a_config(tmp_path: Path):
    checker = Path(sys.executable).with_name("pyrefly")
    if not checker.exists():
        pytest.skip("pyrefly is not installed")
    script = tmp_path / "typed.py"
    script.write_text(
        "from paddlenlp_ext import LoRAConfig, PiSSAConfig\n"
        "LoRAConfig(r=8, lora_alpha=16, lora_dropout=0.1, bias='none', use_rslora=True, use_dora=True).r\n"
        "LoRAConfig(rnk=8)\n"
        "PiSSAConfig(lora_bias=True)\n"
    )
    done = subprocess.run(
        [checker, "check", script, "--search-path", ROOT], capture_output=True, text=True, check=False
    )
    problems = [line for line in done.stdout.splitlines() if line.lstrip().startswith("ERROR")]
    assert len(problems) == 2 and "`rnk`" in problems[0] and "`lora_bias`" in problems[1], done.stdout


@pytest.mark.parametrize("method", METHODS)
def test_dropout_of_a_resumed_run_may_change(method: type):
    fields = {field.name for field in dataclasses.fields(method)}
    assert {name for name in fields if name.endswith("dropout")} <= method.free_on_resume
    assert method.free_on_resume - PeftConfig.free_on_resume <= fields


def test_option_can_be_read_and_set_under_its_other_names():
    config = LoRAConfig(rank=4, alpha=2)
    assert (config.r, config.rank, config.lora_rank, config.lora_alpha, config.alpha) == (4, 4, 4, 2, 2)
    config.rank = 6
    assert config == LoRAConfig(r=6, lora_alpha=2)
    with pytest.raises(AttributeError, match="has no attribute 'lora_rnk'"):
        config.lora_rnk  # noqa: B018


def test_replaced_config_keeps_the_source_of_its_initial_factors():
    stored = PiSSAConfig(r=4).with_source("stored", over_residual=True)
    changed = stored.replace(lora_dropout=0.5)
    assert (changed.factors_source, changed.over_residual, changed.lora_dropout) == ("stored", True, 0.5)
    assert dataclasses.replace(stored, r=2).factors_source == "new"
    with pytest.raises(ValueError, match="lora_dropout"):
        stored.replace(lora_dropout=2.0)
