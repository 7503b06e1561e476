"""Test recompute plans: unchanged losses and gradients, also with dropout, and fewer saved activations."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.config.recompute_options import REFINED_OPS
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn import recompute
from paddlenlp_ext.nn.activation_offload import offload
from paddlenlp_ext.nn.recompute import RecomputePlan, recompute_region
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.models import TINY_LLAMA

ALL_KEPT = dict.fromkeys(REFINED_OPS, -1)
PLANS = {
    "full": RecomputePlan(),
    "full_attn": RecomputePlan("full_attn"),
    "core_attn": RecomputePlan("core_attn"),
    "some layers": RecomputePlan(excluded_layers=frozenset({1})),
    "some attentions": RecomputePlan("core_attn", frozenset({0})),
    **{place: RecomputePlan(saved_regions={place: -1}) for place in REFINED_OPS},
    "all in one layer": RecomputePlan(saved_regions=dict.fromkeys(REFINED_OPS, 1)),
    "all": RecomputePlan(saved_regions=ALL_KEPT),
}
ADAPTERS = {
    "none": None,
    "lora": LoRAConfig(rank=4, dropout=0.3),
    "prefix": PrefixTuningConfig(num_tokens=3, dropout=0.2, init="random"),
}


def make_model(adapter: str):
    model = AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1)
    if ADAPTERS[adapter] is not None:
        model = get_peft_model(model, ADAPTERS[adapter])
        draw = np.random.default_rng(5)
        for _, parameter in model.named_parameters():
            if not parameter.stop_gradient:
                parameter.set_value(draw.normal(0, 0.1, parameter.shape).astype("float32"))
    model.train()
    return model


def run(adapter: str, plan: RecomputePlan | None) -> tuple[float, dict[str, np.ndarray]]:
    model = make_model(adapter)
    if plan is not None:
        model.enable_recompute(plan)
    paddle.seed(3)
    ids = paddle.to_tensor(np.random.default_rng(0).integers(1, 60, (2, 17)))
    loss = model(ids, document_lengths=[[10, 7], [17]]).square().mean()
    loss.backward()
    return float(loss), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", params=ADAPTERS)
def plain(request):
    return request.param, *run(request.param, None)


@pytest.mark.parametrize("name", PLANS)
def test_recompute_gives_same_loss_and_gradients(plain, name):
    adapter, want_loss, want = plain
    loss, gradients = run(adapter, PLANS[name])
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert gradients.keys() == want.keys() and want
    for key, gradient in want.items():
        # Layers with selected regions run op by op, not in training blocks: sums have another order.
        np.testing.assert_allclose(gradients[key], gradient, rtol=0, atol=5e-6 * np.abs(gradient).max(), err_msg=key)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("regions", [{}, ALL_KEPT, {"mlp_row_ln": 1}], ids=["none", "all", "one"])
def test_recompute_with_inputs_off_the_device_gives_the_same_bits(adapter, regions):
    want_loss, want = run(adapter, RecomputePlan(saved_regions=regions))
    loss, gradients = run(adapter, RecomputePlan(saved_regions=regions, offloads_inputs=True))
    assert loss == want_loss and gradients.keys() == want.keys()
    for name, gradient in want.items():
        np.testing.assert_array_equal(gradients[name], gradient, err_msg=name)


def test_recompute_offloads_the_input_of_every_recomputed_layer(monkeypatch):
    saved = []

    class Recorded:
        def __init__(self, x):
            self.offloaded, self.loads = offload(x), 0
            saved.append(self)

        def load(self):
            self.loads += 1
            return self.offloaded.load()

    monkeypatch.setattr(recompute, "offload", Recorded)
    model = make_model("none")
    model.enable_recompute(RecomputePlan(excluded_layers=frozenset({1}), offloads_inputs=True))
    model(paddle.to_tensor([[1, 2, 3]])).sum().backward()
    assert [(each.loads, each.offloaded.load().shape) for each in saved] == [(1, [1, 3, 32])]
    with paddle.no_grad():
        model(paddle.to_tensor([[1, 2, 3]]))
    assert len(saved) == 1, "nothing is saved without gradients"


def test_recompute_saved_regions_run_once():
    """Count calls of each projection in a training step: two if recomputed, one if its result is saved."""

    def calls(plan: RecomputePlan) -> dict[str, int]:
        model, counts = make_model("none"), {}
        model.enable_recompute(plan)
        for name, layer in model.model.layers[1].named_sublayers():
            if name.endswith("_proj"):
                counts[name] = 0
                layer.register_forward_pre_hook(lambda *_, name=name: counts.update({name: counts[name] + 1}))
        model(paddle.to_tensor([[1, 2, 3]])).sum().backward()
        return counts

    attention = {f"self_attn.{letter}_proj" for letter in "qkvo"}
    halves = {"mlp.gate_proj", "mlp.up_proj"}
    assert set(calls(RecomputePlan()).values()) == {2} and set(calls(RecomputePlan("core_attn")).values()) == {1}
    assert {name for name, n in calls(RecomputePlan("full_attn")).items() if n == 2} == attention
    assert {name for name, n in calls(RecomputePlan(saved_regions={"mlp_column_ln": -1})).items() if n == 1} == halves
    assert {name for name, n in calls(RecomputePlan(saved_regions={"mlp_row_ln": 2})).items() if n == 1} == {
        "mlp.down_proj"
    }
    assert set(calls(RecomputePlan(saved_regions={"mlp_row_ln": 1})).values()) == {2}, (
        "calls of layer 1; only layer 0 is saved"
    )
    assert set(calls(RecomputePlan(excluded_layers=frozenset({1}))).values()) == {1}


def test_recompute_saves_fewer_activations():
    """Count the activations that Paddle's autograd saves for the backward pass."""

    def num_saved(plan: RecomputePlan | None) -> int:
        model, sizes = make_model("none"), {}
        own = {id(parameter) for parameter in model.parameters()}
        if plan is not None:
            model.enable_recompute(plan)

        def pack(tensor):
            if id(tensor) not in own:
                sizes[tensor.data_ptr()] = tensor.size
            return tensor

        with paddle.autograd.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model.hidden_states(paddle.to_tensor([list(range(1, 41))]))
        assert hidden.shape == [1, 40, 32]
        return sum(sizes.values())

    everything, attention_recomputed, layers_recomputed = (
        num_saved(None),
        num_saved(RecomputePlan("full_attn")),
        num_saved(RecomputePlan()),
    )
    assert layers_recomputed < attention_recomputed < everything
    assert layers_recomputed < num_saved(RecomputePlan(excluded_layers=frozenset({0}))) < everything


def test_check_layers_unknown_layers_are_named():
    with pytest.raises(ValueError, match=r"has no layers \[2, 7\]; use 0 to 1"):
        make_model("none").enable_recompute(RecomputePlan(excluded_layers=frozenset({0, 2, 7})))


def test_recompute_region_outside_layer_calls_function():
    assert recompute_region("flash_attn", lambda a, b: (a, b), 1, 2) == (1, 2)
