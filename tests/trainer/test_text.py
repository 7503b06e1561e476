"""What is known of a run's tokenizer and template without loading them, and when it holds no longer."""

from __future__ import annotations

import shutil
from datetime import date as real_date
from pathlib import Path

import pytest

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.data.templates import load_template
from paddlenlp_ext.trainer import tokenizer as text_module
from paddlenlp_ext.trainer.tokenizer import load_text
from paddlenlp_ext.utils.logging import get_logger
from tests.common.training import make_config

CHAT = "{% for m in messages %}{{ m['content'] + '</s>' }}{% endfor %}"
DATED = CHAT + "{# strftime_now #}"


@pytest.fixture
def loaded(monkeypatch) -> list[Path]:
    """Every tokenizer that is loaded from now on."""
    paths = []
    monkeypatch.setattr(text_module, "load_tokenizer", lambda path: paths.append(path) or load_tokenizer(path))
    return paths


def config_for(folders: Path, chat_template: str | None = "none"):
    return make_config(
        folders / "out",
        model_name_or_path=str(folders / "model"),
        data_cache_dir=str(folders / "cache"),
        chat_template=chat_template,
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("option", ["none", None, "chat.jinja"])
def test_the_second_run_answers_as_the_first_and_loads_nothing(run_folders, loaded, option):
    (run_folders / "model" / "chat_template.jinja").write_text(CHAT)
    (run_folders / "chat.jinja").write_text(CHAT.replace("content'] +", "content'] + ' ' +"))
    config = config_for(run_folders, str(run_folders / option) if option == "chat.jinja" else option)
    first = load_text(config)
    assert len(loaded) == 1
    second = load_text(config)
    assert (second.tokenizer.pad_token_id, second.tokenizer.eos_token_id) == (0, 2)
    assert second.fingerprint == first.fingerprint
    assert second.template.identity == first.template.identity
    assert second.template.stop_token_ids == first.template.stop_token_ids == (2,)
    first.tokenizer.save_pretrained(str(run_folders / "saved"))
    second.tokenizer.save_pretrained(str(run_folders / "saved again"))
    assert files_of(run_folders / "saved again") == files_of(run_folders / "saved") != {}
    assert len(loaded) == 1, "nothing above needs the tokenizer itself"

    assert second.tokenizer.decode([5, 10]) == first.tokenizer.decode([5, 10])
    assert second.template.encode_prompt("red =") == first.template.encode_prompt("red =")
    assert len(loaded) == 2, "once, for both questions"


def changed_tokenizer(folders: Path) -> None:
    file = folders / "model" / "tokenizer.json"
    content = file.read_text()
    file.unlink()
    file.write_text(content.replace('"red"', '"der"'))  # of the same length


def new_template(folders: Path) -> None:
    (folders / "model" / "chat_template.jinja").write_text(CHAT)


def another_code(folders: Path) -> None:
    shutil.copytree(text_module._CODE[0], folders / "code")
    text_module._CODE[0] = folders / "code"
    (folders / "code" / "tokenizer.py").write_text("")


@pytest.mark.parametrize("change", [changed_tokenizer, new_template, another_code])
def test_what_a_tokenizer_is_made_of_is_watched(run_folders, loaded, monkeypatch, change):
    monkeypatch.setattr(text_module, "_CODE", list(text_module._CODE))
    before = load_text(config_for(run_folders, None))
    change(run_folders)
    after = load_text(config_for(run_folders, None))
    assert len(loaded) == 2
    assert (after.fingerprint, after.template.text) == (
        text_module.tokenizer_fingerprint(load_tokenizer(run_folders / "model")),
        load_template(None, load_tokenizer(run_folders / "model")).text,
    )
    assert change is another_code or before != after


def test_a_template_file_is_watched(run_folders, loaded):
    for content in (CHAT, CHAT.replace("content'] +", "content'] + ' ' +")):
        (run_folders / "chat.jinja").write_text(content)
        assert load_text(config_for(run_folders, str(run_folders / "chat.jinja"))).template.text == content


@pytest.mark.parametrize(("template", "times_loaded"), [(CHAT, 1), (DATED, 2)])
def test_what_a_template_says_today_is_not_taken_for_tomorrow(run_folders, loaded, monkeypatch, template, times_loaded):
    (run_folders / "chat.jinja").write_text(template)
    for day in (1, 1, 2, 2):
        today = real_date(2026, 1, day)
        monkeypatch.setattr(text_module, "date", type("Date", (), {"today": staticmethod(lambda today=today: today)}))
        load_text(config_for(run_folders, str(run_folders / "chat.jinja")))
    assert len(loaded) == times_loaded


@pytest.mark.parametrize("suffix", ["jinja", "json"])
def test_a_template_that_ends_no_answer_warns_in_every_run(run_folders, caplog, monkeypatch, suffix):
    monkeypatch.setattr(get_logger(), "propagate", True)
    pieces = '{"conversation": ["{{user}} ", "{{bot}}!"], "query": "{{query}} "}'
    file = run_folders / f"chat.{suffix}"
    file.write_text(CHAT.replace("</s>", "!") if suffix == "jinja" else pieces)
    for _ in range(2):
        caplog.clear()
        load_text(config_for(run_folders, str(file)))
        assert "writes no special token behind an answer" in caplog.text


def test_what_can_not_be_loaded_is_an_error_every_time(run_folders):
    (run_folders / "model" / "tokenizer.json").write_text("{")
    for _ in range(2):
        with pytest.raises(ValueError, match="can't read the tokenizer there"):
            load_text(config_for(run_folders))
    assert not list((run_folders / "cache").glob("*/facts.json"))
