"""Uploads to the Hugging Face hub, with a stand-in for the hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from paddlenlp_ext.checkpoint.hub_upload import PushToHub, check_hub_login, upload_model, upload_run
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft import LoraConfig, get_peft_model
from tests.common.hub import FakeHub
from tests.common.models import TINY_LLAMA

PUBLISHED = {
    *("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "additional_chat_templates/tools.jinja", "README.md", "all_results.json"),
}
PRIVATE = {
    *("run_config.json", "trainer_state.json", "history.jsonl", "metrics.jsonl", "report.html", "data_audit.json"),
    *("data_audit.html", "bad_steps.jsonl", "generated_output.json", "generated_output_test.json", ".run.lock"),
    *("label_scores.json", "training_state.safetensors", "training_state.json", "manifest.json", ".env"),
    *("checkpoint-2/adapter_model.safetensors", "checkpoint-2/tokenizer.json", "cache/model.safetensors"),
}
"""Files with rows of the data, local paths or the state of a run."""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return a folder `my-run` with all files that a run can write."""
    for name in PUBLISHED | PRIVATE:
        path = tmp_path / "my-run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "my-run"


@pytest.mark.parametrize("private", [None, True])
def test_upload_model_creates_the_repository_and_uploads_only_files_of_the_model(hub: FakeHub, run_folder, private):
    assert upload_model(run_folder, "org/name", private, "test") == "https://huggingface.co/org/name"
    assert hub.repositories == {"org/name": private}
    assert set(hub.files["org/name"]) == PUBLISHED


def test_upload_model_name_without_organisation_belongs_to_the_user(hub: FakeHub, run_folder):
    upload_model(run_folder, "name", None, "test")
    assert list(hub.files) == ["user/name"]


def test_upload_model_folder_without_weights_raises_before_a_repository_is_created(hub: FakeHub, tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"test: .* has no weights to upload \(model\.safetensors"):
        upload_model(tmp_path, "org/name", None, "test")
    assert not hub.repositories


def test_check_hub_login_without_token_names_the_remedy(hub: FakeHub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match=r"push_to_hub: no token .* HF_TOKEN .* or run `hf auth login`"):
        check_hub_login("org/name", "push_to_hub")


def test_check_hub_login_offline_raises(hub: FakeHub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"push_to_hub: HF_HUB_OFFLINE is set, .* unset this"):
        check_hub_login("org/name", "push_to_hub")


@pytest.mark.parametrize("name", ["my run", "a/b/c", "-x"])
def test_check_hub_login_invalid_name_raises(hub: FakeHub, name):
    with pytest.raises(
        ValueError, match=rf"push_to_hub: '{name}' is not a valid repository name; choose organisation/name"
    ):
        check_hub_login(name, "push_to_hub")


@pytest.mark.parametrize("error", [ConnectionError("no route\nand more"), RuntimeError("no route")])
def test_upload_run_failed_upload_says_that_the_run_is_saved_and_how_to_repeat(hub: FakeHub, run_folder, error):
    hub.failure = error
    with pytest.raises(ValueError, match=r"Error: no route\); training is complete and saved in") as raised:
        upload_run(run_folder, None, True)
    assert str(raised.value).endswith(f"to repeat the upload: pnx push {run_folder} --repo my-run --private")


def test_push_to_hub_without_token_saves_nothing(hub: FakeHub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    model, saved = PushToHub(), []
    model.save_pretrained = saved.append
    with pytest.raises(ValueError, match="no token"):
        model.push_to_hub("org/name")
    assert not saved


def test_push_to_hub_of_models_uploads_what_save_pretrained_writes(hub: FakeHub, tmp_path):
    base = AutoModelForCausalLM.from_config(TINY_LLAMA)
    for model, folder in ((base, "base"), (get_peft_model(base, LoraConfig(r=2)), "adapter")):
        model.save_pretrained(tmp_path / folder)
        assert model.push_to_hub(f"org/{folder}", private=True) == f"https://huggingface.co/org/{folder}"
        saved = {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        assert hub.files[f"org/{folder}"] == saved
    assert hub.repositories == {"org/base": True, "org/adapter": True}
