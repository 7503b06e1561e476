"""The template of a training run travels with the folders that the run writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.cli.predict_arguments import parse_arguments
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.inference.choose_chat_template import choose_template
from paddlenlp_ext.peft.merge.write_merged import write_companions
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import load_data
from tests.common.training import make_config

JINJA = (
    "{% for m in messages %}{{ m.role + ' ' + m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
PADDLENLP = {"conversation": ["ask {{user}} ", "say {{bot}}</s>"], "query": "ask {{query}} say "}
FILES = {
    "jinja": ("chat.jinja", JINJA),
    "json": ("chat.json", json.dumps({"chat_template": JINJA})),
    "paddlenlp": ("chat.json", json.dumps(PADDLENLP, indent=1)),
}
ASKED = Conversation.asking("a b")


@pytest.mark.parametrize("format_", FILES)
def test_folders_of_a_run_have_its_template_after_a_move(run_folders, tmp_path, format_, monkeypatch):
    name, content = FILES[format_]
    file = run_folders / name
    file.write_text(content)
    base = load_tokenizer(run_folders / "model")
    base.chat_template = "{{ 'base' }}" + JINJA
    base.save_pretrained(run_folders / "model")
    config = make_config(
        run_folders / "out",
        model_name_or_path=str(run_folders / "model"),
        dataset_name_or_path=str(run_folders / "data"),
        data_cache_dir=str(run_folders / "cache"),
        chat_template=str(file),
        device="cpu",
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    data = load_data(config)
    expected = data.template.encode_prompt(ASKED)
    trainer = build_trainer(config, data)
    trainer.train()
    trainer.save_model()
    (checkpoint,) = (run_folders / "out").glob("checkpoint-*")
    shutil.copy(checkpoint / "run_config.json", run_folders / "out")
    moved = tmp_path / "moved"
    shutil.move(run_folders / "out", moved)
    file.unlink()
    monkeypatch.chdir(tmp_path)
    merged = tmp_path / "merged"
    merged.mkdir()
    write_companions(merged, run_folders / "model", moved, None)
    for folder in (moved, moved / checkpoint.name, merged):
        assert encoded_by_library(folder) == expected
        own = AutoTokenizer.from_pretrained(str(folder))
        if format_ == "paddlenlp":
            assert own.chat_template is None and not (folder / "chat_template.jinja").exists()
            continue
        assert (folder / "chat_template.jinja").read_text() == JINJA
        messages = [{"role": "user", "content": "a b"}]
        assert own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == expected


def encoded_by_library(folder: Path) -> list[int]:
    """Return the prompt tokens of the programs that read a saved folder."""
    arguments = parse_arguments(["--model_name_or_path", str(folder)])
    return choose_template(arguments, [str(folder)], load_tokenizer(folder)).encode_prompt(ASKED)
