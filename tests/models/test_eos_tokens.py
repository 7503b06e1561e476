"""Test end tokens: read with the model, extended, saved, used by `generate`."""

from __future__ import annotations

import json

import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.models.tiny_model import make_model


def test_eos_token_ids_are_read_extended_and_saved(tmp_path):
    make_model(eos_token_id=5).save_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.eos_token_ids == [5]
    model.add_eos_token_ids([7, 5])
    model.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text())["eos_token_id"] == [5, 7]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "b").eos_token_ids == [5, 7]


def test_generate_ends_at_eos_token_ids_by_default():
    model = make_model()
    free = model.generate([[1, 2, 3]], max_new_tokens=6)[0]
    assert len(free) == 6
    model.add_eos_token_ids([free[2]])
    first = free.index(free[2])
    assert model.generate([[1, 2, 3]], max_new_tokens=6)[0] == free[:first]
    assert model.generate([[1, 2, 3]], max_new_tokens=6, eos_token_id=None)[0] == free
    assert paddle.is_grad_enabled()
