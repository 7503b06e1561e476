"""Merge commands merge_peft_params.py and merge_vera_params.py: every method, and VeRA's shared projections."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.config_json import write_model_config
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import save_sharded
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.methods.mora import MoRAConfig
from paddlenlp_ext.peft.methods.moslora import MoSLoRAConfig
from paddlenlp_ext.peft.methods.vera import VeRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.utils.run_command import run_command
from tests.common.models import ODD_SIZES
from tests.common.scripts import LLM, load_script

CONFIG = {
    "model_type": "llama",
    **ODD_SIZES,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
ADAPTERS = {
    "vera": VeRAConfig(rank=9),
    "vera_seeded": VeRAConfig(rank=9, save_projection=False, target_modules=["k_proj", "down_proj"]),
    "mora": MoRAConfig(rank=2),
    "mora_sharing": MoRAConfig(rank=2, folding="sharing"),
    "moslora": MoSLoRAConfig(rank=3),
}


def run(name: str, *arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run_command(load_script(LLM / f"{name}.py").main, [str(argument) for argument in arguments])
        raise SystemExit(0)
    return ended.value.code


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    save_sharded(folder, AutoModelForCausalLM.from_config(CONFIG, seed=3).state_dict())
    write_model_config(folder, CONFIG)
    return folder


def save_adapter(folder: Path, base: Path, config: PeftConfig) -> PeftModel:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    paddle.seed(0)
    for name, tensor in model.adapter_state().items():
        if name not in config.own_keys:
            tensor.set_value(tensor + 0.1 * paddle.randn(tensor.shape))
    model.eval()
    model.save_pretrained(folder)
    return model


def logits(model: paddle.nn.Layer) -> np.ndarray:
    model.eval()
    with paddle.no_grad():
        return model(paddle.arange(22).reshape([2, 11])).numpy()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_merge_peft_params_merges_every_method(base: Path, tmp_path: Path, adapter: str, capsys: pytest.CaptureFixture):
    model = save_adapter(tmp_path / "adapter", base, ADAPTERS[adapter])
    arguments = ("--peft_path", tmp_path / "adapter", "--output_path", tmp_path / "merged", "--device", "cpu")
    assert run("merge_peft_params", *arguments) == 0
    assert f"{4 if adapter == 'vera_seeded' else 14} layers merged" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(logits(merged), logits(model), rtol=0, atol=1e-5)
    assert sorted(open_weights(tmp_path / "merged").names()) == sorted(open_weights(base).names())


@pytest.mark.parametrize("output", ["--output_path", "--merge_vera_model_path"])
def test_merge_vera_params_merges_a_vera_adapter(base: Path, tmp_path: Path, output: str):
    model = save_adapter(tmp_path / "adapter", base, ADAPTERS["vera"])
    arguments = ("--model_name_or_path", base, "--vera_path", tmp_path / "adapter", output, tmp_path / "merged")
    assert run("merge_vera_params", *arguments, "--device", "cpu", "--low_gpu_mem", "True") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(logits(merged), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["merge_vera_params", "merge_peft_params"])
def test_merge_command_user_error_is_one_line(name: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    argument = "--vera_path" if name == "merge_vera_params" else "--peft_path"
    assert run(name, argument, base, "--output_path", tmp_path / "merged") == 2
    assert "no adapter here" in capsys.readouterr().err
    assert run(name, argument, base) == 2
    assert "--output_path" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_merge_peft_params_vera_uses_the_stored_projections(base: Path, tmp_path: Path):
    """Merge stored projections that differ from those of the key: the stored ones are used."""
    model = save_adapter(tmp_path / "adapter", base, VeRAConfig(rank=9))
    state = model.adapter_state()
    for name in VeRAConfig.own_keys:
        state[name].set_value(state[name] * 1.5)
    model.save_pretrained(tmp_path / "adapter")
    assert run("merge_peft_params", "--peft_path", tmp_path / "adapter", "--output_path", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(logits(merged), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["lokr", "lora", "peft", "vera"])
def test_merge_help_names_the_program(name, capsys):
    with pytest.raises(SystemExit):
        load_script(LLM / f"merge_{name}_params.py").main(["--help"])
    usage = f"usage: merge_{name}_params.py --{name}_path ADAPTER --output_path MERGED [--key value ...]\n"
    assert capsys.readouterr().out.startswith(usage)
