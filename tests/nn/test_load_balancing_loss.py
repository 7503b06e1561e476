"""Auxiliary loss of routers against its formula, and the counts of tokens per expert."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.load_balancing_loss import imbalance
from paddlenlp_ext.nn.recompute import RecomputePlan
from tests.common.models import TINY_SIZES

CONFIG = {
    **TINY_SIZES,
    "model_type": "mixtral",
    "num_local_experts": 5,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.7,
}
IDS = np.random.default_rng(0).integers(0, TINY_SIZES["vocab_size"], (2, 9))


def build(**changes):
    model = AutoModelForCausalLM.from_config({**CONFIG, **changes})
    for layer in model.model.layers:
        layer.mlp.gate.weight.set_value(layer.mlp.gate.weight * 3)
    return model


def logits_of(model, ids, mask=None):
    """Return the routers' logits [L, T, E] of a pass."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_pre_hook(
            lambda gate, inputs: found.append(inputs[0].numpy() @ gate.weight.numpy().T)
        )
        for layer in model.model.layers
    ]
    with paddle.no_grad():
        model(paddle.to_tensor(ids), attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return np.stack(found).astype(np.float64)


def formula(logits_LTE, keep_T=None):
    """Return c E sum f P over the tokens of all layers, float64."""
    probabilities = np.exp(logits_LTE) / np.exp(logits_LTE).sum(-1, keepdims=True)
    chosen = np.zeros_like(probabilities)
    np.put_along_axis(chosen, np.argsort(-probabilities, axis=-1)[..., :2], 1, axis=-1)
    keep_T = np.ones(logits_LTE.shape[1], bool) if keep_T is None else keep_T
    f, p = (x[:, keep_T].mean(axis=(0, 1)) for x in (chosen, probabilities))
    return 0.7 * logits_LTE.shape[-1] * (f * p).sum()


def loss_and_gradients(model, ids, mask=None):
    labels = ids if mask is None else np.where(mask.numpy() == 1, ids, -100)
    output = model(paddle.to_tensor(ids), attention_mask=mask, labels=paddle.to_tensor(labels))
    output.loss.backward()
    return float(output.loss), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def test_auxiliary_loss_is_added_to_the_loss_and_matches_its_formula():
    model, without = build(), build(output_router_logits=False)
    with paddle.no_grad():
        plain = float(without(paddle.to_tensor(IDS), labels=paddle.to_tensor(IDS)).loss)
    assert loss_and_gradients(model, IDS)[0] - plain == pytest.approx(formula(logits_of(model, IDS)), rel=1e-4)
    assert without.load_balance.loss is None


def test_auxiliary_loss_gradient_matches_differences():
    model = build()
    weight = model.model.layers[1].mlp.gate.weight  # the second layer's router changes no other router
    with_loss = loss_and_gradients(model, IDS)[1]["model.layers.1.mlp.gate.weight"]
    without = loss_and_gradients(build(output_router_logits=False), IDS)[1]["model.layers.1.mlp.gate.weight"]
    shift, step, values = np.random.default_rng(1).standard_normal(weight.shape), 1e-3, []
    original = weight.numpy()
    for sign in (1, -1):
        weight.set_value((original + sign * step * shift).astype(np.float32))
        values.append(formula(logits_of(model, IDS)))
    expected = (values[0] - values[1]) / (2 * step)
    assert ((with_loss - without) * shift).sum() == pytest.approx(expected, rel=2e-3)


def test_auxiliary_loss_of_two_pipeline_stages_has_the_gradients_of_one_pass():
    """Run each layer as a stage of its own, and exchange what the stages send."""
    model, ids = build(), paddle.to_tensor(IDS)
    decoder, balance = model.model, model.load_balance
    hidden = model.hidden_states(ids)
    (hidden.mean() + balance.loss).backward()
    loss, gradients = float(balance.loss), [layer.mlp.gate.weight.grad.numpy() for layer in decoder.layers]
    model.clear_gradients()

    inputs = decoder.attention_inputs(ids, None, None, None)
    balance.begin()
    first, sent = balance.current, decoder.run_layers(decoder.embed(ids), inputs, 0, 1)
    received = sent.detach()
    received.stop_gradient = False
    balance.begin()
    balance.current.earlier_sums = first.sums()
    hidden = balance.attach_loss(decoder.final_norm(decoder.run_layers(received, inputs, 1, 2)))
    (hidden.mean() + balance.loss).backward()
    first.slopes = balance.current.slopes
    paddle.autograd.backward([sent], [received.grad])
    assert float(balance.loss) == pytest.approx(loss, rel=1e-6)
    for layer, gradient in zip(decoder.layers, gradients, strict=True):
        np.testing.assert_allclose(layer.mlp.gate.weight.grad.numpy(), gradient, rtol=0, atol=1e-7)
        assert np.abs(gradient).max() > 1e-4


def test_auxiliary_loss_ignores_padding():
    model, mask = build(), np.ones_like(IDS)
    mask[1, 6:] = 0
    padded = loss_and_gradients(model, IDS, paddle.to_tensor(mask))
    logits = logits_of(model, IDS, paddle.to_tensor(mask))
    assert float(model.load_balance.loss) == pytest.approx(formula(logits, mask.reshape(-1) == 1), rel=1e-4)
    changed = IDS.copy()
    changed[1, 6:] = 3
    for one, other in zip(
        padded[1].values(), loss_and_gradients(build(), changed, paddle.to_tensor(mask))[1].values(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("plan", [RecomputePlan(), RecomputePlan(saved_regions={"mlp_column_ln": -1, "mlp_row_ln": 1})])
def test_recomputed_layers_have_the_same_loss_gradients_and_counts(plan):
    results = []
    for recompute in (None, plan):
        model = build()
        model.train()
        if recompute is not None:
            model.enable_recompute(recompute)
        results.append((*loss_and_gradients(model, IDS), model.load_balance.pop_counts()))
    (loss, gradients, counts), (other_loss, others, other_counts) = results
    # The layers of a plan that selects regions run op by op, not in training blocks.
    tolerance = 0 if plan == RecomputePlan() else 3e-6
    assert loss == pytest.approx(other_loss, rel=tolerance, abs=0) and np.array_equal(counts, other_counts)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, others[name], rtol=0, atol=tolerance * abs(gradient).max(), err_msg=name)


def test_counts_are_those_of_passes_with_gradients_and_begin_again_after_they_are_read():
    model = build(output_router_logits=False)
    loss_and_gradients(model, IDS)
    with paddle.no_grad():
        model(paddle.to_tensor(IDS))
    counts = model.load_balance.pop_counts()
    assert counts.shape == (2, 5) and (counts.sum(axis=1) == 2 * IDS.size).all()
    assert not model.load_balance.pop_counts().any()


def test_counts_of_a_pass_that_is_not_counted_are_zero_even_if_it_is_recomputed():
    model = build()
    model.train()
    model.enable_recompute(RecomputePlan())
    with model.load_balance.without_padding(None, is_counted=False):
        hidden = model.hidden_states(paddle.to_tensor(IDS))
    hidden.sum().backward()
    assert not model.load_balance.pop_counts().any()


def test_counts_of_recomputed_passes_that_overlap_ignore_the_padding_of_each():
    """Run two forward passes before the backward pass of the first, as a pipeline does."""
    model = build()
    model.train()
    model.enable_recompute(RecomputePlan())
    hidden = []
    for length, padding in ((9, 4), (6, 1)):
        mask = np.arange(length)[None].repeat(2, axis=0) < length - padding
        with model.load_balance.without_padding(mask):
            hidden.append(model.hidden_states(paddle.to_tensor(IDS[:, :length])))
    for states in hidden:
        states.sum().backward()
    assert (model.load_balance.pop_counts().sum(axis=1) == 2 * 2 * (5 + 5)).all()


def test_imbalance_is_the_largest_load_over_the_mean_averaged_over_layers_with_experts():
    assert imbalance(np.array([[6, 2, 1, 3], [0, 0, 0, 0], [2, 2, 2, 2]])) == 1.5
    assert imbalance(np.zeros((2, 3))) == 0.0
