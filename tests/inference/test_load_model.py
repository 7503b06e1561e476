"""Models that an adapter names: errors in their config.json."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.api import AutoPeftModelForCausalLM
from paddlenlp_ext.inference.load_model import find_source
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.models import TINY_LLAMA


def test_error_in_the_config_of_an_adapters_base_names_the_base(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    AutoModelForCausalLM.from_config(TINY_LLAMA).save_pretrained(base)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoRAConfig(rank=2)).save_pretrained(adapter)
    (base / "config.json").write_text(json.dumps({**TINY_LLAMA, "hidden_act": "swish2"}))
    for load in (AutoPeftModelForCausalLM.from_pretrained, lambda folder: find_source(str(base), str(folder))):
        with pytest.raises(ValueError, match=f"^{base}: .*swish2"):
            load(adapter)
