"""Several adapters on one quantized base: switching, weighted sums, and sharded files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.load_weighted_sum import load_combined
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from tests.common.adapters import logits_of, tiny_model, train

NF4 = QuantizationConfig(algo="nf4", double_quant=True)
CONFIGS = {"narrow": LoRAConfig(rank=3), "wide": LoRAConfig(rank=5), "dora": DoRAConfig(rank=2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a base model in several files."""
    path = tmp_path_factory.mktemp("sets")
    tiny_model("qwen2").save_pretrained(path / "base", max_shard_bytes=8000)
    assert len(list((path / "base").glob("*.safetensors"))) > 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / "base" / name).write_text("{}")
    return path


def quantized(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=NF4)


def trained(folder: Path, name: str, config: PeftConfig) -> np.ndarray:
    model = get_peft_model(quantized(folder), config)
    train(model, steps=3)
    model.eval()
    model.save_pretrained(folder / name)
    return logits_of(model)


def test_set_adapter_over_quantized_base_gives_each_adapters_logits(folder: Path):
    expected = {name: trained(folder, name, config) for name, config in CONFIGS.items()}
    first, *others = CONFIGS
    model = PeftModel.from_pretrained(quantized(folder), folder / first, first)
    for name in others:
        model.load_adapter(folder / name, name)
    for name in reversed(CONFIGS):
        model.set_adapter(name)
        assert np.array_equal(logits_of(model), expected[name])
    with model.disable_adapter():
        assert np.array_equal(logits_of(model), logits_of(quantized(folder)))


def test_merge_adapter_of_combined_over_quantized_base_keeps_logits(folder: Path, tmp_path: Path):
    for name in ("narrow", "wide"):
        trained(folder, name, CONFIGS[name])
    model = load_combined(quantized(folder), {folder / "narrow": 0.5, folder / "wide": 0.5})
    model.save_pretrained(tmp_path / "sum")
    merge_adapter(tmp_path / "sum", tmp_path / "merged", AutoModelForCausalLM.from_pretrained)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(logits_of(merged), logits_of(model), rtol=0, atol=1e-5)


def test_save_pretrained_quantized_shards_reload_exactly(folder: Path, tmp_path: Path):
    model = quantized(folder)
    model.save_pretrained(tmp_path, max_shard_bytes=4000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert np.array_equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(model))
