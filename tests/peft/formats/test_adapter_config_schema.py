"""Wrong values in the fields of adapter_config.json, in every method."""

from __future__ import annotations

import json
import re

import pytest

from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.stress.fuzz_adapters import written_fields
from tests.stress.wrong_values import OF_OTHER_TYPE, places, replaced, value_at

INITIAL = ("init_lora_weights", "init_weights", "init_ia3_weights")  # also strings; of no effect on stored tensors
NAMES = ("target_modules", "feedforward_modules")  # also a regular expression
WRITTEN_AS_INTEGERS = ("lora_alpha", "alpha")
SEED = "projection_prng_key"


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_from_pretrained_value_of_another_type_raises_with_its_field(switch, tmp_path):
    fields = written_fields(switch)
    for path in places(fields):
        value, name = value_at(fields, path), path[-1]
        for wrong in OF_OTHER_TYPE.get(float if name in WRITTEN_AS_INTEGERS else type(value), ()):
            if (name in INITIAL + NAMES and isinstance(wrong, str)) or (name == SEED and wrong == 10**12):
                continue
            (tmp_path / "adapter_config.json").write_text(json.dumps(replaced(fields, path, wrong)))
            with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as caught:
                PeftConfig.from_pretrained(tmp_path)
            assert any(str(step) in str(caught.value) for step in path), (path, wrong, str(caught.value))
