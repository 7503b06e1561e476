"""Merge command merge_lokr_params.py on LoKr folders of PaddleNLP, whose config stores a scale of 0."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lokr import LoKrConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.adapters import logits_of, tiny_model, train
from tests.common.scripts import LLM, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(LLM / "merge_lokr_params.py")


@pytest.mark.parametrize("output_argument", ["--output_path", "--merge_lokr_model_path"])
def test_merge_lokr_params_paddlenlp_folder_equals_trained_model(
    script: ModuleType, output_argument: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    model = get_peft_model(tiny_model("qwen2"), LoKrConfig(rank=2, target_modules=["q_proj", "up_proj"]))
    train(model, steps=3)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    tensors = {name.replace("model.", "qwen2.", 1): tensor.numpy() for name, tensor in model.adapter_state().items()}
    write_safetensors(adapter / "lokr.safetensors", tensors)
    fields = {"lokr_dim": 2, "lokr_alpha": 0.0, "scaling": 0.0, "target_modules": [".*q_proj.*", ".*up_proj.*"]}
    # The base on the command line takes precedence over the one in the config.
    (adapter / "lokr_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": "elsewhere"}))
    arguments = [
        "--lokr_path",
        adapter,
        output_argument,
        tmp_path / "merged",
        "--model_name_or_path",
        tmp_path / "base",
    ]
    script.main([str(argument) for argument in [*arguments, "--device", "cpu", "--low_gpu_mem", "True"]])
    assert "4 layers merged" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    np.testing.assert_allclose(logits_of(merged), logits_of(model), rtol=0, atol=1e-5)
    assert np.abs(logits_of(merged) - logits_of(tiny_model("qwen2"))).max() > 1e-3


def test_merge_lokr_params_pickle_needs_allow_pickle(script: ModuleType, tmp_path: Path):
    tiny_model().save_pretrained(tmp_path / "base")
    model = get_peft_model(tiny_model(), LoKrConfig(rank=2, target_modules=["q_proj"]))
    train(model, steps=3)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    tensors = {name.replace("model.", "llama.", 1): tensor for name, tensor in model.adapter_state().items()}
    paddle.save(tensors, str(adapter / "lokr_model_state.pdparams"))
    (adapter / "lokr_config.json").write_text(json.dumps({"lokr_dim": 2, "target_modules": [".*q_proj.*"]}))
    arguments = [
        "--lokr_path",
        adapter,
        "--output_path",
        tmp_path / "merged",
        "--model_name_or_path",
        tmp_path / "base",
    ]
    arguments = [str(argument) for argument in [*arguments, "--device", "cpu"]]
    with pytest.raises(ValueError, match="--allow_pickle"):
        script.main(arguments)
    script.main([*arguments, "--allow_pickle"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    np.testing.assert_allclose(logits_of(merged), logits_of(model), rtol=0, atol=1e-5)
