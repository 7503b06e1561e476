"""Test reft_predictor.py with its documented arguments."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.cli.predict_arguments import parse_arguments
from paddlenlp_ext.cli.reft_predictor import predictor_arguments
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.scripts import LLM, load_script
from tests.llm.test_predictor import ROWS, base, data_file  # noqa: F401 (fixtures)


@pytest.fixture
def script() -> ModuleType:
    """Load the script as a module."""
    return load_script(LLM / "predict" / "reft_predictor.py")


@pytest.fixture
def reft(base: Path, tmp_path: Path) -> Path:  # noqa: F811
    """Save ReFT interventions that change the answers."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), ReFTConfig(rank=4))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        if not parameter.stop_gradient:
            parameter.set_value(rng.normal(0, 0.5, parameter.shape).astype(np.float32))
    model.save_pretrained(tmp_path / "reft")
    return tmp_path / "reft"


def test_reft_predictor_answers_equal_generate(script, base, reft, data_file):  # noqa: F811
    output = data_file.with_name("answers.json")
    words = f"--model_name_or_path {base} --reft_path {reft} --output_file {output} --batch_size 2 --num_beams 1"
    script.main([*words.split(), "--data_file", str(data_file), "--max_length", "158", "--src_length", "150"])
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["src"] for line in lines] == ["What is two and two?", ["Name a colour.", "Another one."], "Hällo"]
    plain = AutoModelForCausalLM.from_pretrained(base)
    prompt = load_template(None, tokenizer := AutoTokenizer.from_pretrained(base)).encode_prompt(
        Conversation.asking(ROWS[0]["src"])
    )
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), reft)
    expected, without_reft = (
        tokenizer.decode(m.generate([prompt], max_new_tokens=8)[0], skip_special_tokens=True) for m in (model, plain)
    )
    assert lines[0]["output"] == expected != without_reft


def test_reft_predictor_without_data_file_chats(script, base, reft, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    script.main(
        ["--model_name_or_path", str(base), "--reft_path", str(reft), "--max_length", "58", "--src_length", "50"]
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    prompt = load_template(None, tokenizer).encode_prompt(Conversation.asking("Hi"))
    (tokens,) = PeftModel.from_pretrained(model, reft).generate([prompt], max_new_tokens=8)
    assert capsys.readouterr().out == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"


def test_reft_predictor_several_beams_search_by_beams(base, reft):  # noqa: F811
    words = ["--model_name_or_path", str(base), "--reft_path", str(reft), "--num_beams", "2"]
    arguments = parse_arguments(predictor_arguments(words))
    assert (arguments.decode_strategy, arguments.num_beams) == ("beam_search", 2)


def test_reft_predictor_invalid_arguments_are_named(script, base, reft, data_file, tmp_path):  # noqa: F811
    files = ["--model_name_or_path", str(base), "--data_file", str(data_file)]
    with pytest.raises(ValueError, match="--max_length 512 leaves no tokens after --src_length 512"):
        script.main([*files, "--reft_path", str(reft), "--max_length", "512"])
    with pytest.raises(ValueError, match=r"num_beams.*at least 1"):
        script.main([*files, "--reft_path", str(reft), "--num_beams", "0"])
    lora = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoRAConfig(rank=2))
    lora.save_pretrained(tmp_path / "lora")
    with pytest.raises(ValueError, match="holds an adapter of type LORA"):
        script.main([*files, "--reft_path", str(tmp_path / "lora")])
