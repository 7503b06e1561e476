"""Adapters of models whose layers have other names in files than in memory, stored as Hugging Face PEFT expects."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import LazyTensor, SafetensorsFile, write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts

FEED_FORWARD = {
    "granite_4_without_rope": {"shared_mlp.input_linear", "shared_mlp.output_linear"},
    "lfm2_convolutions": {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3"},
    "falcon_h1_two_mixers": {f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}
MIXERS = {
    "granite_4_without_rope": {f"self_attn.{name}_proj" for name in "qkvo"},
    "lfm2_convolutions": {
        *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")),
        *("conv.in_proj", "conv.out_proj"),
    },
    "falcon_h1_two_mixers": {*(f"self_attn.{name}_proj" for name in "qkvo"), "mamba.in_proj", "mamba.out_proj"},
}


def new_model(family: str):
    return AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]})


def logits(model) -> np.ndarray:
    model.eval()
    with paddle.no_grad():
        return model(paddle.to_tensor(random_prompts((9, 9)))).numpy()


def trained(family: str, config: LoRAConfig) -> PeftModel:
    model = get_peft_model(new_model(family), config)
    paddle.seed(0)
    for tensor in model.adapter_state().values():
        tensor.set_value(tensor + 0.1 * paddle.randn(tensor.shape))
    return model


@pytest.mark.parametrize("family", FEED_FORWARD)
@pytest.mark.parametrize(
    "targets",
    [None, ["down_proj", "o_proj"], [r".*layers\.0\..*(down|o)_proj"], [r".*layers\.1\..*(up|q)_proj"]],
    ids=["all", "leaves", "pattern", "pattern_of_projections"],
)
def test_adapter_is_stored_under_the_names_of_peft_and_loads_again(family, targets, tmp_path):
    model = trained(family, LoRAConfig(rank=3, target_modules=targets))
    model.save_pretrained(tmp_path)
    keys = SafetensorsFile(tmp_path / "adapter_model.safetensors").names()
    assert all(key.startswith("base_model.model.model.layers.") for key in keys)
    layers = {key.partition(".lora_")[0].split(".", 5)[5] for key in keys}
    allowed = FEED_FORWARD[family] | MIXERS[family]
    assert layers == allowed if targets is None else layers < allowed
    fields = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    stored = {target.rpartition(".")[2] for target in fields["target_modules"]}
    assert stored == {layer.rpartition(".")[2] for layer in layers}
    again = PeftModel.from_pretrained(new_model(family), tmp_path)
    np.testing.assert_array_equal(logits(again), logits(model))


def test_target_modules_may_have_the_names_of_files():
    model = get_peft_model(new_model("lfm2_convolutions"), LoRAConfig(rank=2, target_modules=["w2", "in_proj"]))
    adapted = {name.partition(".lora_")[0].split(".", 3)[3] for name in model.adapter_state()}
    assert adapted == {"mlp.down_proj", "conv.b_proj", "conv.c_proj", "conv.u_proj"}


def test_adapter_that_peft_trained_on_fused_and_renamed_layers_loads(tmp_path):
    """Test a dense B of a fused layer, whose projections get their rows."""
    rng, prefix = np.random.default_rng(0), "base_model.model.model.layers.0"
    shapes = {
        "shared_mlp.input_linear.lora_A": (2, 32),
        "shared_mlp.input_linear.lora_B": (96, 2),
        "shared_mlp.output_linear.lora_A": (2, 48),
        "shared_mlp.output_linear.lora_B": (32, 2),
    }
    arrays = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = {
        f"{prefix}.{name}.weight": LazyTensor(values.shape, "float32", lambda values=values: values)
        for name, values in arrays.items()
    }
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["input_linear", "output_linear"],
        "layers_to_transform": [0],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    found = logits(PeftModel.from_pretrained(new_model("granite_4_without_rope"), tmp_path))

    model = new_model("granite_4_without_rope")
    mlp = model.model.layers[0].mlp
    update = {
        name: 2 * arrays[f"shared_mlp.{name}.lora_B"] @ arrays[f"shared_mlp.{name}.lora_A"]
        for name in ("input_linear", "output_linear")
    }
    parts = (*np.split(update["input_linear"], 2), update["output_linear"])
    for linear, delta in zip((mlp.gate_proj, mlp.up_proj, mlp.down_proj), parts, strict=True):
        linear.weight.set_value(linear.weight + paddle.to_tensor(delta))
    np.testing.assert_allclose(found, logits(model), rtol=0, atol=5e-5)
