"""Requests with several adapters, and without one, in one running batch: each gets its own adapter's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.continuous_batching import Engine
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.low_rank_factors import Factors
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.mixed_batches import SHARED, AdapterGroups, RowAdapters, RowLoRALinear
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from tests.common.adapters import default_config, tiny_model
from tests.generation.engine_answers import Answer, run

PROMPTS = [np.random.default_rng(seed).integers(0, 61, 3 + 4 * seed).tolist() for seed in range(2)]
ADAPTERS = {
    "narrow": lambda: LoRAConfig(rank=2, target_modules=("q_proj", "o_proj")),
    "wide": lambda: LoRAConfig(rank=5, rank_pattern={"o_proj": 3}),
    "vera": lambda: default_config("vera"),
    "head": lambda: LoRAConfig(rank=2, target_modules=("lm_head", "v_proj")),
    "ia3": lambda: default_config("ia3"),
    "prefix_tuning": lambda: default_config("prefix_tuning", num_tokens=3),
    "prompt_tuning": lambda: default_config("prompt_tuning", num_tokens=3),
    "reft": lambda: ReFTConfig(position="f2+l1", rank=2),
    "trainable_tokens": lambda: default_config("trainable_tokens"),
}
OF_A_SHARED_PASS = ("narrow", "wide", "vera")


def save_adapters(folder: Path, base, names) -> None:
    """Save an adapter of random weights under each name."""
    for number, name in enumerate(names):
        model = get_peft_model(base(), ADAPTERS[name](), seed=number)
        rng = np.random.default_rng(number)
        for tensor in model.adapter_state().values():
            if tensor.dtype == paddle.float32:
                tensor.set_value(tensor.numpy() + rng.normal(0, 0.4, tensor.shape).astype(np.float32))
        model.save_pretrained(folder / name)


def check_one_batch(folder: Path, base, names) -> AdapterGroups:
    """Compare requests of all adapters and of the base in one running batch with each adapter alone."""
    variants = [name for name in ("base", *names) for _ in PROMPTS]
    prompts = [prompt for _ in ("base", *names) for prompt in PROMPTS]
    expected = base().generate(PROMPTS, max_new_tokens=5, batch_size=1, eos_token_id=None)
    for name in names:
        alone = PeftModel.from_pretrained(base(), folder / name)
        expected += alone.generate(PROMPTS, max_new_tokens=5, batch_size=1, eos_token_id=None)
    assert len(set(map(tuple, expected))) > len(expected) - 2, "adapters do not change the answers"
    groups = AdapterGroups(base(), {name: read_adapter(folder / name) for name in names})
    answers = [Answer(prompt, 5, adapter=name) for prompt, name in zip(prompts, variants, strict=True)]
    order = np.random.default_rng(0).permutation(len(answers))
    run(Engine(groups, max_rows=7, prompt_tokens_per_step=6), [answers[index] for index in order], steps_between=1)
    assert [answer.tokens for answer in answers] == expected
    return groups


def test_engine_with_adapters_of_all_kinds_equals_each_adapter_alone(tmp_path: Path):
    save_adapters(tmp_path, tiny_model, ADAPTERS)
    groups = check_one_batch(tmp_path, tiny_model, tuple(ADAPTERS))
    shared = [name for name in ADAPTERS if groups.group_of(name) == SHARED]
    assert shared == list(OF_A_SHARED_PASS) and groups.group_of("base") == SHARED


@pytest.mark.parametrize("family", ["latent_experts", "sinks"])
def test_engine_with_adapters_of_other_families_equals_each_adapter_alone(tmp_path: Path, family: str):
    def base():
        return tiny_model(family)

    save_adapters(tmp_path, base, ("wide", "prefix_tuning"))
    groups = check_one_batch(tmp_path, base, ("wide", "prefix_tuning"))
    assert groups.group_of("wide") == ("wide" if family == "latent_experts" else SHARED)


def test_engine_with_adapters_over_a_quantized_base_equals_each_adapter_alone(tmp_path: Path):
    tiny_model("qwen2").save_pretrained(tmp_path / "base")

    def base():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=QuantizationConfig(algo="nf4")
        )

    save_adapters(tmp_path, base, ("narrow", "wide"))
    check_one_batch(tmp_path, base, ("narrow", "wide"))


def test_row_lora_linear_adds_each_rows_own_product():
    """Compare with the formula, for rows in [B, S, in] and in [B * S, in], as layers of experts receive them."""
    rng, rows = np.random.default_rng(0), RowAdapters()
    base = tiny_model().model.layers[0].mlp.down_proj
    factors = {
        name: Factors(*(paddle.to_tensor(rng.normal(size=shape).astype(np.float32)) for shape in shapes))
        for name, shapes in {"a": ((2, 44), (36, 2)), "b": ((3, 44), (36, 3))}.items()
    }
    layer = RowLoRALinear(base, factors, rows)
    x_BSI = paddle.to_tensor(rng.normal(size=(4, 5, 44)).astype(np.float32))
    names = ["b", "other", "a", "b"]
    rows.select(names)
    expected = base(x_BSI).numpy()
    for row, name in enumerate(names):
        if name in factors:
            a, b = (each.numpy() for each in factors[name][:2])
            expected[row] += x_BSI[row].numpy() @ a.T @ b.T
    np.testing.assert_allclose(layer(x_BSI).numpy(), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layer(x_BSI.flatten(0, 1)).numpy(), expected.reshape(20, 36), rtol=1e-4, atol=1e-4)


def test_adapter_groups_adapter_with_nan_is_refused(tmp_path: Path):
    model = get_peft_model(tiny_model(), LoRAConfig(rank=2))
    weight = model.adapter_state()["model.layers.1.self_attn.v_proj.lora_B.weight"]
    weight.set_value(paddle.full(weight.shape, float("inf")))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"adapter bad: model.layers.1.self_attn.v_proj has NaN or infinite weights"):
        AdapterGroups(tiny_model(), {"bad": read_adapter(tmp_path)})
