"""Merge command merge_lora_params.py: merged files, checks before writing, and errors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.config_json import write_model_config
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import save_sharded
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.merge import write_merged
from paddlenlp_ext.peft.methods.lora import LoRAConfig, LoRALinear
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.quantized_weight_source import QuantizedWeights
from paddlenlp_ext.utils.run_command import run_command
from tests.common.models import ODD_SIZES
from tests.common.scripts import LLM, load_script

CONFIG = {
    "model_type": "qwen2",
    **ODD_SIZES,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(LLM / "merge_lora_params.py")


def base_model() -> CausalLM:
    return AutoModelForCausalLM.from_config(CONFIG, seed=3)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    save_sharded(folder, base_model().state_dict(), max_shard_bytes=30_000)
    write_model_config(folder, CONFIG)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("base's template")
    return folder


def save_adapter(folder: Path, size: float = 0.1, base: Path | None = None, **settings: Any) -> Path:
    model = get_peft_model(base_model(), LoRAConfig(rank=3, **settings))
    paddle.seed(0)
    for _, layer in adapter_layers(model):
        layer.lora_B.weight.set_value(size * paddle.randn(layer.lora_B.weight.shape))
    model.save_pretrained(folder)
    if base is not None:
        fields = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": str(base)}))
    return folder


def run(script: ModuleType, *arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run_command(script.main, [str(argument) for argument in arguments])
        raise SystemExit(0)
    return ended.value.code


def weights(folder: Path) -> dict[str, np.ndarray]:
    source = open_weights(folder)
    return {name: source.read(name, "float32") for name in source.names()}


@pytest.mark.parametrize("output_argument", ["--output_path", "--merge_lora_model_path", "--merge_model_path"])
def test_merge_lora_params_writes_merged_weights_and_copies_other_files(
    script: ModuleType, base: Path, tmp_path: Path, output_argument: str, capsys: pytest.CaptureFixture
):
    adapter = save_adapter(tmp_path / "adapter", rslora=True)
    out = tmp_path / "merged"
    arguments = ("--model_name_or_path", base, "--lora_path", adapter, output_argument, out, "--device", "cpu")
    assert run(script, *arguments, "--safe_serialization", "True", "--low_gpu_mem", "True") == 0
    assert "14 layers merged into the weights of the base" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    before, after, tensors = weights(base), weights(out), weights_of_adapter(adapter)
    assert before.keys() == after.keys()
    for name in before:
        module = name.removesuffix(".weight")
        a, b = tensors.get(f"{module}.lora_A.weight"), tensors.get(f"{module}.lora_B.weight")
        expected = before[name] if a is None else before[name] + 4 / 3**0.5 * b @ a
        np.testing.assert_allclose(after[name], expected, rtol=0, atol=0 if a is None else 1e-6)
    assert json.loads((out / "config.json").read_text()) == {**CONFIG, "architectures": ["Qwen2ForCausalLM"]}


def weights_of_adapter(folder: Path) -> dict[str, np.ndarray]:
    source = open_weights(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): source.read(name) for name in source.names()}


def test_merge_lora_params_without_base_uses_the_one_the_adapter_names(script: ModuleType, base: Path, tmp_path: Path):
    adapter = save_adapter(tmp_path / "adapter", base=base)
    assert run(script, "--lora_path", adapter, "--output_path", tmp_path / "merged") == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize(("dtype", "expected"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_merge_lora_params_without_adapter_copies_the_base(
    script: ModuleType, base: Path, tmp_path: Path, dtype: str | None, expected: str, capsys: pytest.CaptureFixture
):
    out = tmp_path / "copy"
    chosen = ("--dtype", dtype) if dtype else ()
    assert run(script, "--model_name_or_path", base, "--output_path", out, *chosen) == 0
    assert "no adapter was given, so nothing was merged" in capsys.readouterr().out
    source = open_weights(out)
    assert {source.dtype(name) for name in source.names()} == {expected}
    before, after = weights(base), weights(out)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=0 if dtype is None else 2**-8, atol=0)
    assert (out / "chat_template.jinja").read_text() == "base's template"
    assert "already exists" in error_of(script, capsys, out, "--model_name_or_path", base)


def test_merge_lora_params_gpu_without_a_gpu_merges_on_the_cpu(
    script: ModuleType, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("paddlenlp_ext"), "propagate", True)
    adapter = save_adapter(tmp_path / "adapter", base=base)
    assert run(script, "--lora_path", adapter, "--output_path", tmp_path / "cpu", "--device", "cpu") == 0
    assert run(script, "--lora_path", adapter, "--output_path", tmp_path / "gpu", "--device", "gpu") == 0
    assert "--device gpu: no GPU is available; running on the CPU" in caplog.text
    for name, value in weights(tmp_path / "cpu").items():
        np.testing.assert_array_equal(weights(tmp_path / "gpu")[name], value)


def test_merge_lora_params_missing_base_names_the_adapter(
    script: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    adapter = save_adapter(tmp_path / "adapter", base=tmp_path / "absent")
    assert run(script, "--lora_path", adapter, "--output_path", tmp_path / "merged") == 2
    error = capsys.readouterr().err
    assert f"{adapter} names its base model as" in error and "--model_name_or_path BASE" in error


def test_merge_lora_params_expands_home_in_paths(
    script: ModuleType, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_adapter(tmp_path / "adapter", base=base)
    assert run(script, "--lora_path", "~/adapter", "--output_path=~/merged") == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_merge_lora_params_prefers_the_adapters_tokenizer(script: ModuleType, base: Path, tmp_path: Path):
    adapter = save_adapter(tmp_path / "adapter", base=base)
    (adapter / "tokenizer_config.json").write_text('{"mine": 1}')
    (adapter / "chat_template.jinja").write_text("adapter's template")
    (adapter / "run_config.json").write_text('{"chat_template": "none"}')
    assert run(script, "--lora_path", adapter, "--output_path", tmp_path / "merged") == 0
    assert json.loads((tmp_path / "merged" / "run_config.json").read_text()) == {"chat_template": "none"}
    assert json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text()) == {"mine": 1}
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "adapter's template"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_merge_lora_params_dtype_converts_weights_and_config(
    script: ModuleType, base: Path, tmp_path: Path, dtype: str
):
    adapter = save_adapter(tmp_path / "adapter", size=0.5, base=base)
    assert run(script, "--lora_path", adapter, "--output_path", tmp_path / "merged", "--dtype", dtype) == 0
    source = open_weights(tmp_path / "merged")
    assert {source.dtype(name) for name in source.names()} == {dtype}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["torch_dtype"] == dtype


def error_of(script: ModuleType, capsys: pytest.CaptureFixture, output: Path, *arguments: object) -> str:
    """Return the error of a command that fails; check that it has no traceback and leaves no output."""
    before = sorted(output.parent.iterdir())
    assert run(script, "--output_path", output, *arguments) == 2
    assert sorted(output.parent.iterdir()) == before
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_merge_lora_params_adapter_without_effect_is_an_error(
    script: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    adapter = save_adapter(tmp_path / "adapter", size=0.0, base=base)
    assert "this adapter has no effect" in error_of(script, capsys, tmp_path / "merged", "--lora_path", adapter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge_lora_params_wrong_merged_weights_are_an_error(
    script: ModuleType,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
):
    adapter = save_adapter(tmp_path / "adapter", base=base)
    monkeypatch.setattr(write_merged, "merged_weight", lambda layer: layer.base.weight)
    error = error_of(script, capsys, tmp_path / "merged", "--lora_path", adapter, "--dtype", dtype)
    assert "the merged files and the model merged in memory differ by" in error
    assert "nothing is written" in error


def test_merge_lora_params_wrong_delta_weight_is_an_error(
    script: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    adapter = save_adapter(tmp_path / "adapter", base=base)
    original = LoRALinear.delta_weight
    monkeypatch.setattr(LoRALinear, "delta_weight", lambda layer: 1.01 * original(layer))
    error = error_of(script, capsys, tmp_path / "merged", "--lora_path", adapter, "--dtype", "bfloat16")
    assert "the model merged in memory and base with adapter differ by" in error


def test_merge_lora_params_update_lost_in_rounding_is_an_error(
    script: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    adapter = save_adapter(tmp_path / "adapter", size=1e-4, base=base)
    assert run(script, "--lora_path", adapter, "--output_path", tmp_path / "fine") == 0
    error = error_of(script, capsys, tmp_path / "coarse", "--lora_path", adapter, "--dtype", "bfloat16")
    assert "most of the training would be lost; pass --dtype float32" in error
    assert not (tmp_path / "coarse").exists()


def test_merge_lora_params_overwrites_only_a_model_folder(
    script: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    adapter = save_adapter(tmp_path / "adapter", base=base)
    out = tmp_path / "merged"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "already exists" in error_of(script, capsys, out, "--lora_path", adapter)
    assert run(script, "--output_path", out / "notes.txt" / "x", "--lora_path", adapter) == 2
    assert "notes.txt is not a directory; choose another path" in capsys.readouterr().err
    assert "is not a model folder" in error_of(script, capsys, out, "--lora_path", adapter, "--overwrite")
    assert "would replace" in error_of(script, capsys, base, "--lora_path", adapter, "--overwrite")
    assert "would replace" in error_of(script, capsys, tmp_path, "--lora_path", adapter, "--overwrite")
    (out / "config.json").write_text("{}")
    assert run(script, "--lora_path", adapter, "--output_path", out, "--overwrite") == 0
    assert not (out / "notes.txt").exists()


def test_merge_lora_params_user_error_is_one_line(
    script: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    adapter, out = save_adapter(tmp_path / "adapter"), tmp_path / "merged"
    assert "does not name its base model; pass --model_name_or_path" in error_of(
        script, capsys, out, "--lora_path", adapter
    )
    named = ("--model_name_or_path", base, "--lora_path")
    assert "no adapter here" in error_of(script, capsys, out, *named, base)
    assert "weights are written only as safetensors, because reading a pickle can run code" in error_of(
        script, capsys, out, *named, adapter, "--safe_serialization", "False"
    )
    assert "nothing to merge: pass --lora_path ADAPTER" in error_of(script, capsys, out)
    assert "nothing to merge: pass --lora_path ADAPTER" in error_of(script, capsys, out, "--model_name_or_path", "")
    assert "device 'tpu' is not available" in error_of(script, capsys, out, *named, adapter, "--device", "tpu")
    assert "unknown key 'lora_pth'; did you mean 'lora_path'?" in error_of(
        script, capsys, out, *named, adapter, "--lora_pth", "x"
    )
    tensors = weights_of_adapter(adapter)
    tensors = {name.replace("layers.1.", "layers.7."): value for name, value in tensors.items()}
    write_tensors(adapter, tensors)
    assert "has no layer for model.layers.7." in error_of(script, capsys, out, *named, adapter)


def write_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    from paddlenlp_ext.peft.formats.write_adapter import write_adapter

    keyed = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    write_adapter(folder, json.loads((folder / "adapter_config.json").read_text()), keyed)


def test_write_merged_weights_reads_no_tensor_in_advance(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that a tensor is read only when it is written."""
    adapter = save_adapter(tmp_path / "adapter", base=base)
    source = open_weights(base)
    stored = read_adapter(adapter)
    prepared = {}
    monkeypatch.setattr(write_merged, "save_sharded", lambda folder, tensors: prepared.update(tensors))
    monkeypatch.setattr(type(source), "read", lambda self, name, dtype=None: pytest.fail(f"{name} was read"))
    modules = write_merged.tensors_by_module(stored, source)
    write_merged.write_merged_weights(tmp_path, QuantizedWeights(source), stored, modules, None)
    assert prepared.keys() == set(source.names())
    assert len(modules) == 14
