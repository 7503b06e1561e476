"""Tokenizer and chat template of a run, as `load_data` loads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.loftq import LoftQConfig
from paddlenlp_ext.trainer import build
from paddlenlp_ext.trainer.build import build_model, load_data
from paddlenlp_ext.utils.logging import get_logger
from tests.common.models import TINY_LLAMA
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
        ValueError, match=r"model_type .gpt_neox. in config\.json is not supported; supported: .*llama,"
    ):
        load_data(config)


def test_load_data_unreadable_tokenizer_is_an_error(run_folders):
    (run_folders / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="read the tokenizer"):
        load_data(config_for(run_folders))


def test_build_model_initializes_the_parts_of_fused_target_modules(tmp_path):
    model = AutoModelForCausalLM.from_config({**TINY_LLAMA, "model_type": "phi3"})
    model.save_pretrained(tmp_path / "model")
    config = make_config(tmp_path / "out", model_name_or_path=str(tmp_path / "model"), weight_quantize_algo="nf4")
    config = replace(config, peft=LoftQConfig(rank=2, target_modules=["qkv_proj"]), peft_switch="loftq")
    adapted = build_model(ModelSource.from_config(config.model), config).model
    factors = {name: layer.lora_B.weight for name, layer in adapter_layers(adapted.base_model)}
    assert len(factors) == 6 and all(np.abs(factor.numpy()).max() > 0 for factor in factors.values())


def test_build_model_on_one_process_has_no_stage_and_reads_full_tensors(run_folders, monkeypatch):
    monkeypatch.setattr(build, "load_shards", lambda *_: pytest.fail("a single process has no shards"))
    config = config_for(run_folders)
    built = build_model(load_data(config).source, config)
    assert built.pipeline is None and built.sharding is None and built.model.model.stage is None
