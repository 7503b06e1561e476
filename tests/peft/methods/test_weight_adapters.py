"""Methods that change weights, such as LoKr, IA3 and MiSS: merging, sharding, training and dtype."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers
from paddlenlp_ext.peft.methods.boft import BOFTConfig
from paddlenlp_ext.peft.methods.hira import HiRAConfig
from paddlenlp_ext.peft.methods.ia3 import IA3Config
from paddlenlp_ext.peft.methods.loha import LoHaConfig
from paddlenlp_ext.peft.methods.lokr import LoKrConfig
from paddlenlp_ext.peft.methods.miss import MiSSConfig
from paddlenlp_ext.peft.methods.oft import OFTConfig
from paddlenlp_ext.peft.methods.shira import SHiRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import FAMILIES, loss_of, tiny_model, train

METHODS = {
    "lokr": LoKrConfig(rank=8),
    "lokr_decomposed": LoKrConfig(rank=1, decompose_both=True, factor=4),
    "loha": LoHaConfig(rank=2),
    "loha_elementwise": LoHaConfig(rank=6),
    "ia3_output": IA3Config(feedforward_modules=()),
    "ia3_input": IA3Config(feedforward_modules=("layer",)),
    "oft": OFTConfig(block_size=4),
    "oft_series": OFTConfig(block_size=3, neumann_terms=5),
    "oft_shared": OFTConfig(num_blocks=6, block_share=True),
    "hira": HiRAConfig(rank=5),
    "shira": SHiRAConfig(rank=3),
    "boft": BOFTConfig(block_size=3),
    "boft_butterfly": BOFTConfig(block_size=2, butterfly_factors=2),
    "miss": MiSSConfig(rank=7),
    "miss_mini": MiSSConfig(rank=7, variant="mini", mini_rank=4),
    "miss_bat": MiSSConfig(rank=4, variant="bat"),
}

DEFAULTS = [
    LoKrConfig(),
    LoHaConfig(),
    IA3Config(),
    OFTConfig(),
    MiSSConfig(),
    HiRAConfig(),
    SHiRAConfig(),
    BOFTConfig(),
]


def random_layer(config: PeftConfig, bias: bool = False) -> LinearAdapter:
    paddle.seed(0)
    base = Linear(24, 16, bias=bias)
    for parameter in base.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    layer = config.wrap("layer", base, seed=1)
    for tensor in layer.own_state().values():
        if not tensor.stop_gradient:
            tensor.set_value(0.6 * paddle.randn(tensor.shape) + (1 if isinstance(config, IA3Config) else 0))
    return layer


@pytest.mark.parametrize("method", METHODS)
def test_weight_adapter_delta_weight_matches_forward(method: str):
    layer = random_layer(METHODS[method], bias=True)
    x = np.random.default_rng(0).standard_normal((2, 5, 24)).astype(np.float32)
    merged = layer.base.weight.numpy() + layer.delta_weight().numpy()
    delta_bias = layer.delta_bias()
    bias = layer.base.bias.numpy() + (0 if delta_bias is None else delta_bias.numpy())
    out = layer(paddle.to_tensor(x)).numpy()
    np.testing.assert_allclose(out, x @ merged.T + bias, rtol=1e-4, atol=2e-5)
    assert np.abs(out - layer.base(paddle.to_tensor(x)).numpy()).max() > 0.1


@pytest.mark.parametrize("style", ["colwise", "rowwise", "replicated"])
@pytest.mark.parametrize("method", METHODS)
def test_weight_adapter_two_shards_give_unsharded_output(method: str, style: str):
    """Shard base and adapter along `sharding_axes`: joined or summed outputs equal the unsharded output."""
    full = random_layer(METHODS[method])
    axes = full.sharding_axes(style)
    assert axes.keys() == full.own_state().keys()
    base_axis = {"colwise": 0, "rowwise": 1, "replicated": None}[style]
    x = np.random.default_rng(0).standard_normal((4, 24)).astype(np.float32)
    inputs = np.split(x, 2, 1) if style == "rowwise" else [x, x]
    parts = [shard_of(full, axes, base_axis, index)(paddle.to_tensor(inputs[index])).numpy() for index in range(2)]
    joined = {"colwise": np.concatenate(parts, 1), "rowwise": sum(parts), "replicated": parts[0]}[style]
    np.testing.assert_allclose(joined, full(paddle.to_tensor(x)).numpy(), rtol=1e-4, atol=1e-5)


def shard_of(full: LinearAdapter, axes: dict[str, int | None], base_axis: int | None, index: int) -> LinearAdapter:
    """Return one of two shards of a layer."""
    part = copy.deepcopy(full)
    for name, axis in {**axes, "base.weight": base_axis}.items():
        *path, leaf = name.split(".")
        owner: Any = part
        for step in path:
            owner = getattr(owner, step)
        value = getattr(owner, leaf).numpy()
        piece = value if axis is None else np.split(value, 2, axis)[index]
        start = paddle.nn.initializer.Assign(piece)
        setattr(owner, leaf, owner.create_parameter(list(piece.shape), default_initializer=start))
    part.base.out_features, part.base.in_features = part.base.weight.shape
    style: Any = {0: "colwise", 1: "rowwise", None: "replicated"}[base_axis]
    part.set_tensor_parallel_shard(style, SimpleNamespace(index=index, size=2))
    return part


@pytest.mark.parametrize("config", DEFAULTS, ids=lambda c: c.peft_type)
def test_weight_adapter_training_lowers_loss(config: PeftConfig):
    model = get_peft_model(tiny_model(), config)
    before = float(loss_of(model))
    assert train(model, steps=40, until=0.8 * before) <= 0.8 * before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("config", DEFAULTS, ids=lambda c: c.peft_type)
def test_weight_adapter_saved_adapter_has_base_dtype(config: PeftConfig, dtype: str, tmp_path: Path):
    """Check the dtypes: float16 as the base, and float32 for a bfloat16 base, which computes in float32 on the CPU."""
    own = {"bfloat16": "float32", "float16": "float16"}[dtype]

    def model() -> CausalLM:
        if dtype == "float16":  # no arithmetic on the CPU, so only a conversion gives such a model
            return AutoModelForCausalLM.from_config(FAMILIES["qwen2"], seed=3).to(dtype=dtype)
        return AutoModelForCausalLM.from_config(FAMILIES["qwen2"], seed=3, dtype=dtype)

    adapted = get_peft_model(model(), config)
    everything = adapted.adapter_state()
    state = {name: tensor for name, tensor in everything.items() if not tensor.stop_gradient}  # without positions
    for name, tensor in state.items():
        values = np.random.default_rng(len(name)).uniform(0.1, 0.5, tensor.shape).astype(np.float32)
        tensor.set_value(paddle.to_tensor(values).astype(own))
    assert {tensor.dtype for tensor in state.values()} == {getattr(paddle, own)}
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model(), tmp_path).adapter_state()
    assert all(np.array_equal(tensor.numpy(), loaded[name].numpy()) for name, tensor in everything.items())
    name, layer = next(adapter_layers(adapted))
    expected = (layer.base.weight.astype("float32") + layer.delta_weight()).astype(dtype).numpy()
    merged = dict(adapted.merge_and_unload().named_parameters())[f"{name.removeprefix('base_model.')}.weight"]
    assert np.array_equal(merged.numpy(), expected)


@pytest.mark.parametrize("config", DEFAULTS, ids=lambda c: c.peft_type)
def test_weight_adapter_generate_uses_adapter(config: PeftConfig):
    model = get_peft_model(tiny_model(), config)
    plain = model.generate([[1, 2, 3]], max_new_tokens=6)
    for _, layer in adapter_layers(model):
        for tensor in layer.own_parameters():
            tensor.set_value(tensor + 0.5)
    model.eval()
    (tokens,) = model.generate([[1, 2, 3]], max_new_tokens=6)
    assert tokens != plain[0]
    with paddle.no_grad():
        assert model(paddle.to_tensor([[1, 2, 3, *tokens]]))[0, 2:-1].argmax(-1).tolist() == tokens
