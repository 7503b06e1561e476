"""JSON keys of ReFT, which have no prefix, reach ReFTConfig."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlenlp_ext.config import ConfigError, load_run_config
from paddlenlp_ext.config.known_keys import known_keys
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.registry import peft_methods

RUN = {"model_name_or_path": "m", "dataset_name_or_path": "d", "output_dir": "out", "do_train": True}


def load(folder: Path, **keys: object) -> object:
    file = folder / "run.json"
    file.write_text(json.dumps({**RUN, **keys}))
    return load_run_config([str(file)], peft_methods())


def test_reft_json_keys_reach_config_and_round_trip(tmp_path: Path):
    keys = {
        "reft": True,
        "reft_path": "start",
        "layers": "0;1;2",
        "position": "f7",
        "intervention_type": "LoReftIntervention",
        "rank": 4,
        "act_fn": "relu",
        "add_bias": True,
        "dropout": 0.1,
    }
    config = load(tmp_path, **keys)
    assert config.peft == ReFTConfig(
        path="start", layers="0;1;2", position="f7", rank=4, act_fn="relu", add_bias=True, dropout=0.1
    )
    flat = config.to_flat_dict()
    spellings = known_keys(peft_methods()).keys
    assert {key: flat[spellings[key]] for key in keys} == {**keys, "intervention_type": "LoreftIntervention"}
    assert load(tmp_path, **{spellings[key]: value for key, value in keys.items()}).peft == config.peft


def test_reft_defaults_equal_paddlenlp(tmp_path: Path):
    peft = load(tmp_path, reft=True).peft
    assert (peft.layers, peft.position, peft.intervention_type) == ("all", "f7+l7", "LoreftIntervention")
    assert (peft.rank, peft.act_fn, peft.add_bias, peft.dropout) == (8, "linear", False, 0.0)
    assert load(tmp_path).peft is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rank": 0}, "rank: 0 is out of range"),
        ({"position": "first"}, "position='first' selects no positions"),
        ({"intervention_type": "LoraIntervention"}, 'intervention_type: "LoraIntervention" is not one of'),
        ({"act_fn": "swish"}, 'act_fn: "swish" is not one of'),
        ({"dropout": 1}, "dropout: 1.0 is out of range"),
    ],
)
def test_reft_wrong_json_values_are_reported(keys: dict[str, object], message: str, tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, reft=True, **keys)
    assert message in str(raised.value)
