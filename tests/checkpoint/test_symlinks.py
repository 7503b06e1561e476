"""Links in the folders of models and adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.symlinks import check_links
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.peft.formats.adapter_config import find_config

READERS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": open_weights,
    "config.json": read_model_config,
    "tokenizer.json": load_tokenizer,
    "adapter_config.json": find_config,
    **dict.fromkeys(("pre_caches.npy", "adapter_model.bin", "adapter_model.pdparams"), check_links),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_of_a_link_out_of_the_folder_raise(name, tmp_path):
    (tmp_path / "private").write_text(json.dumps({"model_type": "llama"}))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).symlink_to("../private")
    with pytest.raises(
        ValueError, match=rf"{name}: a symlink to a file outside its folder, {tmp_path}/private; replace the"
    ):
        READERS[name](folder)


def test_check_links_of_templates_out_of_the_folder_raises(tmp_path):
    (tmp_path / "home").mkdir()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "additional_chat_templates").symlink_to(tmp_path / "home")
    with pytest.raises(ValueError, match="a symlink to a file outside its folder"):
        check_links(folder)


def test_check_links_accepts_links_within_the_folder_and_of_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.json").write_text("")
    (folder / "b.json").symlink_to("a.json")
    (folder / "notes.txt").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "linked").symlink_to(folder)
    check_links(folder)
    check_links(tmp_path / "linked")


def test_check_links_of_a_folder_filled_by_the_hub_accepts_its_blobs(tmp_path):
    blob = tmp_path / "cache/models--a--b/blobs/0123"
    blob.parent.mkdir(parents=True)
    blob.write_text("{}")
    (tmp_path / "config.json").symlink_to(blob)
    check_links(tmp_path)
