"""Tokenizer and chat template of a run, as `load_data` loads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paddlenlp_ext.trainer import load_data as load_data_module
from paddlenlp_ext.trainer.load_data import check_training_rows, load_data
from paddlenlp_ext.utils.json_reader import IN_MEMORY
from paddlenlp_ext.utils.logging import get_logger
from tests.common.training import make_config

CHAT = "{% for m in messages %}{{ m['content'] + '</s>' }}{% endfor %}"


def config_for(folders: Path, chat_template: str | None = "none"):
    return make_config(
        folders / "out",
        model_name_or_path=str(folders / "model"),
        data_cache_dir=str(folders / "cache"),
        chat_template=chat_template,
        do_train=False,
    )


def test_load_data_resolves_the_model_and_loads_its_tokenizer(run_folders):
    data = load_data(config_for(run_folders))
    assert data.source.path == data.source.tokenizer_path == run_folders / "model"
    assert (data.tokenizer.pad_token_id, data.tokenizer.eos_token_id) == (0, 2)
    assert data.template.stop_token_ids == (2,)
    assert data.train_rows is data.eval_rows is None


def test_load_data_changed_template_file_is_read_again(run_folders):
    for content in (CHAT, CHAT.replace("content'] +", "content'] + ' ' +")):
        (run_folders / "chat.jinja").write_text(content)
        assert load_data(config_for(run_folders, str(run_folders / "chat.jinja"))).template.text == content


@pytest.mark.parametrize("suffix", ["jinja", "json"])
def test_load_data_template_without_end_token_warns_in_every_run(run_folders, caplog, monkeypatch, suffix):
    monkeypatch.setattr(get_logger(), "propagate", True)
    pieces = '{"conversation": ["{{user}} ", "{{bot}}!"], "query": "{{query}} "}'
    file = run_folders / f"chat.{suffix}"
    file.write_text(CHAT.replace("</s>", "!") if suffix == "jinja" else pieces)
    for _ in range(2):
        caplog.clear()
        load_data(config_for(run_folders, str(file)))
        assert "special token" in caplog.text


def test_load_data_unsupported_family_is_an_error_before_any_row_is_read(run_folders):
    file = run_folders / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "gpt_neox"}))
    config = config_for(run_folders)
    config = replace(
        config, train=replace(config.train, do_train=True), data=replace(config.data, dataset_name_or_path="no data")
    )
    with pytest.raises(
        ValueError, match=r"^/.*: model_type .gpt_neox. in config\.json is not supported; supported: .*llama,"
    ):
        load_data(config)


def test_load_data_unreadable_tokenizer_is_an_error(run_folders):
    (run_folders / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json:1:2: damaged or not JSON"):
        load_data(config_for(run_folders))


ROWS = [{"src": "w1 w2", "tgt": "w3"}, {"src": "w2", "tgt": "w4 w1"}]


def test_check_training_rows_with_dev_ratio_logs_how_many_rows_in_memory_are_held_out(run_folders, caplog, monkeypatch):
    monkeypatch.setattr(get_logger(), "propagate", True)
    config = config_for(run_folders)
    config = replace(
        config,
        train=replace(config.train, do_train=True, do_eval=True),
        data=replace(config.data, dev_ratio=0.5, dataset_name_or_path=IN_MEMORY),
    )
    rows = [{"src": f"w{first} w{second}", "tgt": "w3"} for first in range(6) for second in range(6)]
    data = load_data(config, train_rows=rows)
    assert len(data.train_rows) + len(data.eval_rows) == len(rows) and len(data.eval_rows) > 5
    check_training_rows(config, data.train_rows, data.eval_rows, data.max_context)
    assert f"dev_ratio 0.5: {len(data.eval_rows)} of 36 rows are held out" in caplog.text


def test_load_data_reads_rows_in_memory_in_place_of_files(run_folders):
    config = config_for(run_folders)
    config = replace(config, train=replace(config.train, do_train=True, do_eval=True))
    data = load_data(config, train_rows=ROWS, eval_rows=ROWS[:1])
    assert (len(data.train_rows), len(data.eval_rows)) == (2, 1)
    named = load_data(config, train_rows=ROWS, eval_rows={"short": ROWS[:1], "all": ROWS})
    assert {name: len(rows) for name, rows in named.eval_rows.items()} == {"short": 1, "all": 2}


def test_load_data_with_all_splits_reads_each_split_and_hashes_the_tokenizer_once(run_folders, monkeypatch):
    folder = run_folders / "rows"
    folder.mkdir()
    for number, split in enumerate(("train", "dev", "test"), start=1):
        (folder / f"{split}.json").write_text(number * (json.dumps(ROWS[0]) + "\n"))
    config = config_for(run_folders)
    config = replace(
        config,
        train=replace(config.train, do_train=True, do_eval=True, do_predict=True),
        data=replace(config.data, dataset_name_or_path=str(folder)),
    )
    hashed, real = [], load_data_module.tokenizer_fingerprint
    monkeypatch.setattr(load_data_module, "tokenizer_fingerprint", lambda each: hashed.append(each) or real(each))
    data = load_data(config)
    assert [len(rows) for rows in (data.train_rows, data.eval_rows, data.test_rows)] == [1, 2, 3]
    assert len(hashed) == 1
