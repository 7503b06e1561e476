"""Dtypes of merged and copied models whose base mixes dtypes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.gguf.read_weights import GgufWeights
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.quantized_formats.registry import LAYOUTS
from paddlenlp_ext.checkpoint.safetensors import as_lazy, save_sharded
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.gguf_export import export_gguf
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.models.post_training_quantization import quantize_after_training, save_packed
from paddlenlp_ext.peft.merge.copy_model import copy_model
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.quantize_matrix import PostTrainingOptions
from tests.checkpoint.gguf.llama_cpp_files import make_model, write_model
from tests.common.models import write_tiny_model


def write_gguf(folder: Path, kind: str) -> Path:
    """Write a GGUF file whose matrices have the type `kind`, and whose norms are in F32."""
    model = make_model("llama")
    tokenizer = load_tokenizer(write_model(model, "llama", folder / "reference.gguf"))
    tensors = {name: as_lazy(tensor) for name, tensor in model.config.to_files(dict(model.named_parameters())).items()}
    export_gguf(folder / "base.gguf", model.config, tensors, tokenizer, [3], kind, "tiny")
    return folder / "base.gguf"


def write_gptq(folder: Path, *_: object) -> Path:
    """Write a GPTQ model in bfloat16, whose scales are in float16."""
    write_tiny_model(folder / "plain")
    options = PostTrainingOptions(method="rtn", integers=IntegerFormat(bits=8))
    model = quantize_after_training(ModelSource.resolve(folder / "plain"), options, [])
    (folder / "base").mkdir()
    save_packed(model, folder / "base", LAYOUTS["gptq"](bits=8), "bfloat16")
    load_tokenizer(folder / "plain").save_pretrained(folder / "base")
    return folder / "base"


def write_mixed(folder: Path, *_: object) -> Path:
    """Write an unquantized model whose norms are in float32 and whose other tensors are in bfloat16."""
    write_tiny_model(folder / "base")
    source = open_weights(folder / "base")
    dtypes = {name: "float32" if "norm" in name else "bfloat16" for name in source.names()}
    tensors = {name: as_lazy(paddle.to_tensor(source.read(name)).astype(dtype)) for name, dtype in dtypes.items()}
    save_sharded(folder / "base", tensors)
    return folder / "base"


def dtypes_of(folder: Path) -> set[str]:
    source = open_weights(folder)
    return {source.dtype(name) for name in source.names()}


def save_adapter(base: Path, folder: Path) -> Path:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(str(base)), LoRAConfig(rank=2))
    paddle.seed(0)
    for tensor in model.adapter_state().values():
        tensor.set_value(tensor + 0.1 * paddle.randn(tensor.shape))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("write", "kind", "expected"),
    [
        (write_gguf, "f16", {"float16"}),
        (write_gguf, "bf16", {"bfloat16"}),
        (write_gguf, "q8_0", {"float32"}),
        (write_gptq, "", {"bfloat16"}),
        (write_mixed, "", {"bfloat16", "float32"}),
    ],
)
def test_merged_and_copied_models_have_the_dtype_of_their_base(tmp_path: Path, write, kind: str, expected: set[str]):
    base = write(tmp_path, kind)
    adapter = save_adapter(base, tmp_path / "adapter")
    merge_adapter(adapter, tmp_path / "merged", AutoModelForCausalLM.from_pretrained, base=base)
    copy_model(base, tmp_path / "copy")
    for folder in (tmp_path / "merged", tmp_path / "copy"):
        assert dtypes_of(folder) == expected
        config = read_model_config(folder)
        if len(expected) == 1:
            assert {config.get("dtype") or config.get("torch_dtype")} == expected


def test_merged_model_with_a_chosen_dtype_has_it_in_every_tensor(tmp_path: Path):
    base = write_gguf(tmp_path, "f16")
    assert {GgufWeights(base).dtype(name) for name in GgufWeights(base).names()} == {"float16", "float32"}
    adapter = save_adapter(base, tmp_path / "adapter")
    merge_adapter(adapter, tmp_path / "merged", AutoModelForCausalLM.from_pretrained, base=base, dtype="float32")
    assert dtypes_of(tmp_path / "merged") == {"float32"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert np.isfinite(again(paddle.to_tensor([[1, 2, 3]])).numpy()).all()
