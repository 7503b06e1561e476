"""Models of a run: initial values of fused layers, and models on one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.loftq import LoftQConfig
from paddlenlp_ext.trainer import build_model as build_model_module
from paddlenlp_ext.trainer.build_model import build_model, check_float16
from paddlenlp_ext.trainer.load_data import load_data
from tests.common.models import (
    TINY_DELTA,
    TINY_LLAMA,
    TINY_MAMBA,
    TINY_SINGLE_BLOCKS,
    TINY_SPLIT_DELTA,
    TINY_TWO_MIXERS,
)
from tests.common.training import make_config


def test_build_model_initializes_the_parts_of_fused_target_modules(tmp_path):
    model = AutoModelForCausalLM.from_config({**TINY_LLAMA, "model_type": "phi3"})
    model.save_pretrained(tmp_path / "model")
    config = make_config(tmp_path / "out", model_name_or_path=str(tmp_path / "model"), weight_quantize_algo="nf4")
    config = replace(config, peft=LoftQConfig(rank=2, target_modules=["qkv_proj"]), peft_switch="loftq")
    adapted = build_model(ModelSource.from_config(config.model), config).model
    factors = {name: layer.lora_B.weight for name, layer in adapter_layers(adapted.base_model)}
    assert len(factors) == 6 and all(np.abs(factor.numpy()).max() > 0 for factor in factors.values())


def test_build_model_on_one_process_has_no_stage_and_reads_full_tensors(run_folders, monkeypatch):
    monkeypatch.setattr(build_model_module, "load_shards", lambda *_: pytest.fail("a single process has no shards"))
    folders = {"model_name_or_path": str(run_folders / "model"), "data_cache_dir": str(run_folders / "cache")}
    config = make_config(run_folders / "out", chat_template="none", do_train=False, **folders)
    built = build_model(load_data(config).source, config)
    assert built.pipeline is None and built.sharding is None and built.model.model.stage is None


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (TINY_DELTA, "float16"),
        (TINY_SPLIT_DELTA, "float16"),
        (TINY_MAMBA, "float16"),
        (TINY_TWO_MIXERS, "float16"),
        (TINY_SINGLE_BLOCKS, "float16"),
        (TINY_DELTA, "bfloat16"),
        ({}, "float16"),
    ],
)
def test_check_float16_refuses_recurrent_mixers(tmp_path, family, dtype):
    config = make_config(tmp_path / "out", fp16=dtype == "float16", bf16=dtype == "bfloat16")
    config = replace(config, precision=replace(config.precision, device="gpu"))
    assert config.precision.compute_dtype == dtype
    model = AutoModelForCausalLM.from_config({**TINY_LLAMA, **family})
    if family and dtype == "float16":
        with pytest.raises(ValueError, match=r"(gated delta net|Mamba-2) overflow in float16 training; set bf16: true"):
            check_float16(model, config)
    else:
        check_float16(model, config)
