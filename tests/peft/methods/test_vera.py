"""VeRA: agreement with Hugging Face PEFT, shared matrices, and their regeneration from the key."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from safetensors import safe_open

from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.vera import TorchUniform, VeRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from tests.common.adapters import logits_of, loss_of, same_bits, tiny_model, train
from tests.golden import DATA
from tests.golden.cases.vera_cases import CASES
from tests.golden.cases.weight_adapter_cases import EPSILON, LEARNING_RATE, STEPS
from tests.peft.methods import golden_checks as shared

with_golden = pytest.mark.parametrize("case", CASES)


def load(case: str) -> PeftModel:
    return PeftModel.from_pretrained(shared.base_model(CASES[case]["base"]), DATA / "adapters" / case)


def vectors(model: PeftModel) -> dict[str, paddle.Tensor]:
    return {name: tensor for name, tensor in model.adapter_state().items() if name not in VeRAConfig.own_keys}


@with_golden
def test_vera_peft_adapter_gives_peft_logits_gradients_and_merged_weights(case: str):
    golden, model, base = shared.golden_of(DATA / "adapters" / case), load(case), CASES[case]["base"]
    shared.close(model(shared.ids_of(base)), golden["logits"])
    shared.check_loss_and_backward(model, base, golden)
    shared.check_gradients(vectors(model), shared.part_of(golden, "gradient"))
    shared.check_merged(model, base, golden, golden["logits"])


@with_golden
def test_vera_adamw_steps_give_peft_vectors(case: str):
    golden, model = shared.golden_of(DATA / "adapters" / case), load(case).train()
    optimizer = shared.adamw(model, LEARNING_RATE, 0.01, EPSILON)
    shared.take_steps(optimizer, STEPS, lambda: shared.loss_of(model, CASES[case]["base"]))
    shared.check_tensors(vectors(model), shared.part_of(golden, "trained"))


@with_golden
def test_projections_of_key_equal_peft(case: str):
    golden = shared.golden_of(DATA / "adapters" / case)
    key = CASES[case]["settings"]["projection_prng_key"]
    rank = CASES[case]["settings"]["r"]
    model = load(case)
    layers = dict(adapter_layers(model.base_model))
    fresh = VeRAConfig(rank=rank, projection_prng_key=key).wrapper(layers, seed=0)
    pair = fresh("any", next(iter(layers.values())).base).projections
    assert np.array_equal(pair.a.numpy(), golden["pair:vera_A"])
    assert np.array_equal(pair.b.numpy(), golden["pair:vera_B"])


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (0, [-0.007486820220947266, 0.5364435911178589, -0.8230451345443726, -0.7359390258789062]),
        (2**31 + 5, [0.7254077196121216, 0.9913748502731323, -0.706999659538269, 0.42896854877471924]),
        (2**32 - 1, [0.9875987768173218, 0.14261269569396973, 0.1400160789489746, -0.9009925127029419]),
        (2**32, [-0.007486820220947266, 0.5364435911178589, -0.8230451345443726, -0.7359390258789062]),
    ],
)
def test_torch_uniform_every_bit_of_the_key_counts(key: int, expected: list[float]):
    """Compare with `torch.empty(4).uniform_(-1, 1, generator=torch.Generator().manual_seed(key))`."""
    assert TorchUniform(key).draw((4,), 1.0).tolist() == expected


def test_vera_key_zero_is_a_key():
    pairs = [
        dict(adapter_layers(get_peft_model(tiny_model(), config, seed=5).base_model))["model.layers.0.mlp.up_proj"]
        for config in (VeRAConfig(rank=2, projection_prng_key=0), VeRAConfig(rank=2))
    ]
    assert [layer.projections.key for layer in pairs] == [0, 5]
    bound = (6 / 44) ** 0.5
    np.testing.assert_allclose(pairs[0].projections.a.numpy()[0, :2] / bound, [-0.0074868202, 0.536443591], rtol=1e-6)


@with_golden
def test_vera_peft_adapter_round_trips(case: str, tmp_path: Path):
    load(case).save_pretrained(tmp_path)
    keys = shared.check_same_tensors(tmp_path, DATA / "adapters" / case)
    assert ("base_model.vera_A" in keys) == ("stored" in case)
    shared.check_config_fields(tmp_path, DATA / "adapters" / case)


def test_vera_forward_matches_formula():
    model = get_peft_model(tiny_model(), VeRAConfig(rank=7))
    layers = dict(adapter_layers(model.base_model))
    assert all(layer.projections is layers["model.layers.0.mlp.up_proj"].projections for layer in layers.values())
    rng = np.random.default_rng(0)
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        layer, shape = layers[name], layers[name].base.weight.shape
        d, b = rng.standard_normal(7).astype(np.float32), rng.standard_normal(shape[0]).astype(np.float32)
        layer.vera_lambda_d.set_value(d)
        layer.vera_lambda_b.set_value(b)
        a, projection_b = layer.projections.a.numpy(), layer.projections.b.numpy()
        assert a.shape == (7, 44) and projection_b.shape == (44, 7)
        delta = np.diag(b) @ projection_b[: shape[0]] @ np.diag(d) @ a[:, : shape[1]]
        np.testing.assert_allclose(layer.delta_weight().numpy(), delta, rtol=0, atol=1e-5)
        x = rng.standard_normal((3, shape[1])).astype(np.float32)
        expected = layer.base(paddle.to_tensor(x)).numpy() + x @ delta.T
        np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected, rtol=0, atol=1e-5)


def test_vera_trains_two_vectors_per_layer_and_stores_projections_once(tmp_path: Path):
    model = get_peft_model(tiny_model(), VeRAConfig(rank=8))
    trained = trainable_parameters(model)
    layers = dict(adapter_layers(model.base_model))
    assert sum(p.size for p in trained.values()) == sum(8 + layer.out_features for layer in layers.values())
    assert len(model.parameters()) == len(tiny_model().parameters()) + 2 * len(layers)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "np") as file:
        pairs = [key for key in file.keys() if "vera_A" in key or "vera_B" in key]  # noqa: SIM118
    assert pairs == ["base_model.vera_A", "base_model.vera_B"]
    before = {name: tensor.numpy().copy() for name, tensor in model.adapter_state().items()}
    train(model, steps=2)
    after = {name: tensor.numpy() for name, tensor in model.adapter_state().items()}
    assert all(np.array_equal(before[name], after[name]) == (name in VeRAConfig.own_keys) for name in after)


def test_vera_without_stored_projections_redraws_them_from_key(tmp_path: Path):
    model = get_peft_model(tiny_model(), VeRAConfig(rank=8, save_projection=False), seed=5)
    train(model, steps=3)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["projection_prng_key"] == 5
    assert np.array_equal(logits_of(PeftModel.from_pretrained(tiny_model(), tmp_path)), logits_of(model))
    warm = get_peft_model(tiny_model(), VeRAConfig(path=str(tmp_path)), seed=9)
    assert np.array_equal(logits_of(warm), logits_of(model))
    resumed = get_peft_model(tiny_model(), VeRAConfig(rank=8, save_projection=False), seed=9)
    assert not np.array_equal(logits_of(resumed), logits_of(model))
    resumed.load_weights(tmp_path)
    assert np.array_equal(logits_of(resumed), logits_of(model))
    resumed.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["projection_prng_key"] == 5


def test_vera_two_shards_give_unsharded_output():
    model = get_peft_model(tiny_model(), VeRAConfig(rank=6))
    layer = dict(adapter_layers(model.base_model))["model.layers.0.mlp.up_proj"]
    layer.vera_lambda_b.set_value(paddle.linspace(-1, 1, layer.out_features))
    full = layer.delta_weight().numpy()
    assert layer.sharding_axes("colwise") == {"vera_lambda_d": None, "vera_lambda_b": 0}
    assert layer.sharding_axes("rowwise") == {"vera_lambda_d": None, "vera_lambda_b": None}
    half = layer.out_features // 2
    b = layer.vera_lambda_b.numpy()
    layer.set_tensor_parallel_shard("colwise", SimpleNamespace(index=1, size=2))
    layer.base.out_features = half
    layer.vera_lambda_b = layer.new_parameter(b[half:])
    np.testing.assert_allclose(layer.delta_weight().numpy(), full[half:], rtol=0, atol=1e-6)


def test_vera_training_lowers_loss():
    model = get_peft_model(tiny_model(), VeRAConfig(rank=64))
    before = float(loss_of(model))
    train(model, steps=30)
    assert float(loss_of(model)) < 0.7 * before


def test_save_as_lora_vera_gives_equal_logits(tmp_path: Path):
    model = get_peft_model(tiny_model(), VeRAConfig(rank=8))
    train(model, steps=3)
    save_as_lora(model, tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert loaded.peft_config.peft_type == "LORA"
    np.testing.assert_allclose(logits_of(loaded), logits_of(model), rtol=0, atol=shared.TOLERANCE)


def test_vera_missing_projections_raise(tmp_path: Path):
    """Check that projections that a file should contain are not regenerated."""
    model = get_peft_model(tiny_model(), VeRAConfig(rank=8))
    tensors = {name: tensor.numpy() for name, tensor in model.adapter_state().items()}
    del tensors["vera_A"], tensors["vera_B"]
    with pytest.raises(ValueError, match="2 missing: vera_A, vera_B"):
        model.load_tensors(tensors, str(tmp_path))


def test_vera_checkpoint_of_other_method_raises(tmp_path: Path):
    get_peft_model(tiny_model(), LoRAConfig(rank=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="contains an adapter of type LORA"):
        get_peft_model(tiny_model(), VeRAConfig(rank=8)).load_weights(tmp_path)


def test_vera_invalid_config_raises():
    with pytest.raises(ValueError, match="vera_alpha=16 differs from vera_rank=8, and VeRA has no scale"):
        VeRAConfig(rank=8, alpha=16)
    assert VeRAConfig(rank=8, alpha=8).alpha == 8
    with pytest.raises(ValueError, match="rank: 0 is out of range"):
        VeRAConfig(rank=0)
    with pytest.raises(ValueError, match="dropout: 1 is out of range"):
        VeRAConfig(dropout=1)
    with pytest.raises(ValueError, match="projection_prng_key: -1 is out of range"):
        VeRAConfig(projection_prng_key=-1)


def test_vera_paddlenlp_folder_raises_with_remedy(tmp_path: Path):
    fields = {"r": 8, "vera_alpha": 8, "pissa_init": True, "target_modules": [".*q_proj.*"]}
    (tmp_path / "vera_config.json").write_text(json.dumps(fields))
    write_safetensors(tmp_path / "vera_model_state.safetensors", {"llama.x.vera_d": np.ones(8, np.float32)})
    with pytest.raises(ValueError, match=r"vera_config.json: .*does not save A.*merge_vera_params.py"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


def test_vera_half_precision_base_gets_projections_of_its_dtype():
    model = tiny_model()
    model.to(dtype="float16")
    adapted = get_peft_model(model, VeRAConfig(rank=8))
    assert {str(tensor.dtype) for tensor in adapted.adapter_state().values()} == {"paddle.float16"}
    other = get_peft_model(tiny_model(), VeRAConfig(rank=8))
    rounded = {
        name: tensor.astype("float16").astype("float32").numpy() for name, tensor in other.adapter_state().items()
    }
    assert same_bits(rounded, {name: t.astype("float32").numpy() for name, t in adapted.adapter_state().items()})
