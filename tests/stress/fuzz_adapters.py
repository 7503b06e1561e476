"""Wrong values in adapter_config.json of every method."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.common.adapters import default_config, tiny_model
from tests.stress.wrong_values import mutate

BUILT = 0.5
"""Share of the accepted inputs from which layers are built."""
_FOREIGN = ("modules_to_save", "bias", "exclude_modules", "rank_pattern", "layers_to_transform", "split_layers")


@functools.cache
def written_fields(switch: str) -> dict[str, Any]:
    """Return the fields that a method writes."""
    model = get_peft_model(tiny_model(), default_config(switch))
    config = default_config(switch)
    return {"peft_type": config.peft_type, "base_model_name_or_path": "base", **config.to_adapter_config(model)}


def attack(rng: random.Random, folder: Path) -> PeftConfig:
    """Read the config of an adapter with some wrong values; some of those that are accepted build their layers."""
    fields = mutate(written_fields(rng.choice(PEFT_METHODS.names())), rng, _FOREIGN)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    config = PeftConfig.from_pretrained(folder)
    if rng.random() < BUILT:
        get_peft_model(tiny_model(), config)
    return config
