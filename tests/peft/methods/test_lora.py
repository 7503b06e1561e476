"""LoRA: defaults, ranges, formula, dropout, gradients next to frozen layers, sharding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig, LoRALinear
from paddlenlp_ext.peft.methods.moslora import MoSLoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import FAMILIES, logits_of, loss_of, tiny_model

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def random_layer(rank: int = 3, scaling: float = 0.7, dropout: float = 0.0) -> LoRALinear:
    paddle.seed(0)
    base = Linear(7, 5, bias=True)
    base.weight.set_value(paddle.randn([5, 7]))
    base.bias.set_value(paddle.randn([5]))
    layer = LoRALinear(base, rank, scaling, dropout, seed=1, name="layer")
    layer.lora_B.weight.set_value(paddle.randn([5, rank]))
    return layer


def test_lora_forward_and_delta_match_formula():
    layer = random_layer()
    x = np.random.default_rng(0).standard_normal((2, 4, 7)).astype(np.float32)
    w, bias = layer.base.weight.numpy(), layer.base.bias.numpy()
    a, b = layer.lora_A.weight.numpy(), layer.lora_B.weight.numpy()
    delta = 0.7 * b @ a
    np.testing.assert_allclose(layer.delta_weight().numpy(), delta, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), x @ (w + delta).T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [LoRAConfig, DoRAConfig, MoSLoRAConfig])
def test_lora_gaussian_start_has_peft_standard_deviation(method: type[LoRAConfig]):
    config, base = method(rank=50, init_lora_weights="gaussian"), Linear(400, 5)
    a = config.wrap("x", base, seed=0).lora_A.weight.numpy()
    assert a.std() == pytest.approx(1 / 50, rel=0.02)
    assert np.abs(a).max() > 3 / 50  # a uniform distribution ends at sqrt(3) standard deviations
    assert np.array_equal(a, config.wrap("x", base, seed=0).lora_A.weight.numpy())
    assert not np.array_equal(a, config.wrap("y", base, seed=0).lora_A.weight.numpy())


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, 16 / 8),
        ({"rank": 4}, 2.0),
        ({"rank": 16, "rslora": True}, 4 / 4.0),
        ({"rank": 4, "alpha": 6}, 1.5),
        ({"rank": 4, "alpha": 6, "rslora": True}, 3.0),
    ],
)
def test_lora_scaling_follows_alpha_and_rank(settings: dict, scaling: float):
    layer = LoRAConfig(**settings).wrap("x", Linear(7, 5), seed=0)
    assert layer.scaling == pytest.approx(scaling)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank: 0 is out of range"),
        ({"rank": 2.0}, "rank: expected a whole number, got 2.0"),
        ({"rank": True}, "rank: expected a whole number, got True"),
        ({"alpha": 0}, "alpha: 0 is out of range"),
        ({"alpha": -1.0}, "alpha: -1.0 is out of range"),
        ({"dropout": 1.0}, "dropout: 1.0 is out of range"),
        ({"dropout": -0.1}, "dropout: -0.1 is out of range"),
        ({"plus_scale": 0}, "plus_scale: 0 is out of range"),
        ({"rank_pattern": {"q_proj": 0}}, "rank: 0"),
        ({"target_modules": []}, "lora_target_modules is an empty list"),
    ],
)
def test_lora_config_value_out_of_range_raises(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model(), LoRAConfig(**settings))


def test_lora_a_starts_kaiming_uniform_independent_of_targets():
    layer = LoRALinear(Linear(400, 300), 64, 1.0, 0.0, seed=0, name="x")
    a = layer.lora_A.weight.numpy()
    bound = 400**-0.5
    assert np.abs(a).max() <= bound
    assert np.abs(a).max() > 0.99 * bound
    assert a.std() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not layer.lora_B.weight.numpy().any()
    single = get_peft_model(tiny_model(), LoRAConfig(target_modules=["up_proj"])).adapter_state()
    several = get_peft_model(tiny_model(), LoRAConfig()).adapter_state()
    assert single.keys() < several.keys()
    assert all(np.array_equal(tensor.numpy(), several[name].numpy()) for name, tensor in single.items())


def test_lora_dropout_acts_in_training_only():
    layer = random_layer(dropout=0.5)
    x = paddle.ones([64, 7])
    layer.eval()
    without_dropout = layer(x).numpy()
    assert np.array_equal(without_dropout, layer(x).numpy())
    layer.train()
    noisy = layer(x).numpy()
    assert not np.array_equal(noisy, without_dropout)
    layer.enabled = False
    assert np.array_equal(layer(x).numpy(), layer.base(x).numpy())


@pytest.mark.parametrize("layer_index", [0, 1])
@pytest.mark.parametrize("leaf", LEAVES)
def test_lora_single_target_gets_gradient_next_to_frozen_linears(leaf: str, layer_index: int):
    """Compare with the gradient when all linears are adapted: the other adapters start at zero."""
    pattern = rf".*layers\.{layer_index}\..*{leaf}"
    single = get_peft_model(tiny_model(), LoRAConfig(target_modules=[pattern]))
    assert len(list(adapter_layers(single))) == 1
    several = get_peft_model(tiny_model(), LoRAConfig())
    for model in (single, several):
        model.train()
        loss_of(model).backward()
    for name, tensor in single.adapter_state().items():
        expected = several.adapter_state()[name].grad.numpy()
        np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert any(tensor.grad.numpy().any() for tensor in single.adapter_state().values())


def test_lora_plus_scales_learning_rate_of_b_only():
    model = get_peft_model(tiny_model(), LoRAConfig(plus_scale=16.0))
    scales = {name: model.learning_rate_scale(name) for name, p in model.named_parameters() if not p.stop_gradient}
    assert {scale for name, scale in scales.items() if name.endswith("lora_B.weight")} == {16.0}
    assert {scale for name, scale in scales.items() if name.endswith("lora_A.weight")} == {1.0}
    assert len(scales) == 2 * 2 * len(LEAVES)


@pytest.mark.parametrize("style", ["colwise", "rowwise", "replicated"])
def test_lora_two_shards_give_unsharded_output(style: str):
    """Shard base and adapter along `sharding_axes`: joined or summed outputs equal the unsharded output."""
    full = random_layer()
    full.base.bias.set_value(paddle.zeros([5]))
    axes = full.sharding_axes(style)
    base_axis = {"colwise": 0, "rowwise": 1, "replicated": None}[style]
    x = np.random.default_rng(0).standard_normal((4, 7)).astype(np.float32)

    def halves(value: np.ndarray, axis: int | None) -> list[np.ndarray]:
        return [value, value] if axis is None else np.array_split(value, 2, axis)

    w = halves(full.base.weight.numpy(), base_axis)
    a = halves(full.lora_A.weight.numpy(), axes["lora_A.weight"])
    b = halves(full.lora_B.weight.numpy(), axes["lora_B.weight"])
    inputs = halves(x, 1 if style == "rowwise" else None)
    parts = [inputs[i] @ (w[i] + full.scaling * b[i] @ a[i]).T for i in range(2)]
    join = {"colwise": lambda: np.concatenate(parts, 1), "rowwise": lambda: sum(parts), "replicated": lambda: parts[0]}
    joined = join[style]()
    np.testing.assert_allclose(joined, full(paddle.to_tensor(x)).numpy(), rtol=1e-5, atol=1e-5)


def test_print_trainable_parameters_counts_parameters_and_layers(capsys: pytest.CaptureFixture[str]):
    model = get_peft_model(tiny_model(), LoRAConfig(rank=2, target_modules=["q_proj", "down_proj"]))
    count = 2 * (2 * (36 + 36) + 2 * (36 + 44))
    total = sum(parameter.size for parameter in tiny_model().parameters()) + count
    model.print_trainable_parameters()
    report = capsys.readouterr().out
    assert f"trainable params: {count:,} || all params: {total:,} || trainable%: {100 * count / total:.4f}" in report
    assert "q_proj x2, down_proj x2" in report


def test_lora_generate_uses_adapter():
    model = get_peft_model(tiny_model(), LoRAConfig())
    plain = model.generate([[1, 2, 3]], max_new_tokens=6)
    assert plain == generate(tiny_model(), [[1, 2, 3]], max_new_tokens=6)
    for _, layer in adapter_layers(model):
        layer.lora_B.weight.set_value(paddle.ones(layer.lora_B.weight.shape))
    model.eval()
    (tokens,) = model.generate([[1, 2, 3]], max_new_tokens=6)
    assert tokens != plain[0]
    full = paddle.to_tensor([[1, 2, 3, *tokens]])
    with paddle.no_grad():
        assert model(full)[0, 2:-1].argmax(-1).tolist() == tokens
    assert logits_of(model).shape[-1] == 61


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lora_saved_adapter_has_base_dtype(dtype: str, tmp_path: Path):
    """Check the dtypes: float16 as the base, and float32 for a bfloat16 base, which computes in float32 on the CPU."""
    own = {"bfloat16": "float32", "float16": "float16"}[dtype]

    def model() -> CausalLM:
        if dtype == "float16":  # no arithmetic on the CPU, so only a conversion gives such a model
            return AutoModelForCausalLM.from_config(FAMILIES["llama"], seed=3).to(dtype=dtype)
        return AutoModelForCausalLM.from_config(FAMILIES["llama"], seed=3, dtype=dtype)

    adapted = get_peft_model(model(), LoRAConfig(rank=3))
    state = adapted.adapter_state()
    assert {tensor.dtype for tensor in state.values()} == {getattr(paddle, own)}
    assert all(tensor.astype("float32").numpy().any() for name, tensor in state.items() if ".lora_A." in name)
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model(), tmp_path).adapter_state()
    assert all(np.array_equal(tensor.numpy(), loaded[name].numpy()) for name, tensor in state.items())
    for _, layer in adapter_layers(adapted):
        layer.lora_B.weight.set_value(paddle.ones(layer.lora_B.weight.shape, own))
    q_proj = adapted.base_model.model.layers[0].self_attn.q_proj
    expected = q_proj.base.weight.astype("float32") + q_proj.delta_weight()
    merged = adapted.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    assert np.array_equal(merged.numpy(), expected.astype(dtype).numpy())


def test_lora_load_weights_on_another_base_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def adapted(base: str) -> PeftModel:
        model = AutoModelForCausalLM.from_config(FAMILIES["llama"], name_or_path=base)
        return get_peft_model(model, LoRAConfig(rank=2))

    adapted("one").save_pretrained(tmp_path)
    adapted("./one").load_weights(tmp_path)
    assert not caplog.records
    adapted("another").load_weights(tmp_path)
    assert "trained on one and resumes on another" in caplog.text
