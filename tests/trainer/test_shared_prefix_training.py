"""Training with shared prefixes: gradients of the unshared run, resumed runs, and models that are refused."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from paddlenlp_ext.data.collate import build_collate
from paddlenlp_ext.data.sampler import build_data_order
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.trainer.build_model import adapt_model
from paddlenlp_ext.trainer.forward_backward import loss_sum
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.adapters import MORE_FAMILIES
from tests.common.models import TINY_LLAMA
from tests.common.training import (
    VOCABULARY,
    KillAfter,
    KilledError,
    PrefixedRows,
    Tokenizer,
    assert_same_bits,
    make_config,
    make_model,
    weights,
)

OFF = {"share_prefix": False}
PACKED = {"zero_padding": True, "share_prefix": True, "max_length": 256, "per_device_train_batch_size": 1}
EXPERTS = MORE_FAMILIES["experts"]
MODELS = {
    "full": make_model,
    "LoRA": lambda: trained_lora(),
    "prefix tuning": lambda: get_peft_model(make_model(), PrefixTuningConfig(num_virtual_tokens=3)),
    "sliding window and soft-cap": lambda: from_config(MORE_FAMILIES["sandwich"]),
    "sinks": lambda: from_config(MORE_FAMILIES["sinks"]),
    "latent attention and experts": lambda: from_config(MORE_FAMILIES["latent_experts"]),
    "ALiBi": lambda: from_config({**TINY_LLAMA, "rope_parameters": {"rope_type": "alibi"}}),
}


def from_config(values):
    return AutoModelForCausalLM.from_config(values, seed=1)


def trained_lora():
    """Return a model with LoRA whose B is not zero, so that A has gradients."""
    model = make_model(lora=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.set_value(np.random.default_rng(0).normal(0, 0.1, parameter.shape).astype(np.float32))
    return model


def make_trainer(folder, rows, callbacks=(), **keys):
    return Trainer(make_model(), make_config(folder, **keys), rows, None, Tokenizer(), callbacks=callbacks)


def loss_and_gradients(model, batch):
    loss, num_correct = loss_sum(model, batch)
    (loss / batch.num_target_tokens).backward()
    found = {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.clear_gradient(False)
    return float(loss), num_correct, found


@pytest.mark.parametrize("name", MODELS)
def test_shared_prefixes_give_the_gradients_of_the_unshared_run(name):
    """Check packs of two prefixes, of rows without one and of equal prompts.

    The distance to the unshared gradient is at most 1e-6 of its norm, and 1e-5 for each parameter.
    """
    model, rows = MODELS[name](), PrefixedRows(14, (35, 64))
    rows.rows[2] = dataclasses.replace(rows[0], row_index=2)
    rows.prefixes.groups[[5, 8]] = -1
    model.train()
    packs = [[0, 2, 4, 1, 3, 5, 7], [6, 8, 10, 12, 9, 11, 13]]
    shared, plain = (
        build_collate(rows, make_config("out", **keys).data, 0, VOCABULARY)(packs)
        for keys in (PACKED, {"zero_padding": True})
    )
    assert shared.num_tokens == plain.num_tokens - 3 * 35 - 3 * 64
    got, want = loss_and_gradients(model, shared), loss_and_gradients(model, plain)
    assert got[0] == pytest.approx(want[0], rel=1e-6) and got[1] == want[1]
    assert got[2].keys() == want[2].keys() and want[2]
    distances = {key: np.linalg.norm(got[2][key] - gradient) for key, gradient in want[2].items()}
    norms = {key: np.linalg.norm(gradient) for key, gradient in want[2].items()}
    assert np.linalg.norm([*distances.values()]) <= 1e-6 * np.linalg.norm([*norms.values()])
    for key, distance in distances.items():
        assert distance <= 1e-5 * norms[key], f"{key} differs by {distance / norms[key]:.1e}"


def test_shared_prefix_run_takes_the_steps_of_its_packs_and_resumes_with_the_same_bits(tmp_path, caplog):
    rows = PrefixedRows(60, (40, 97), capacity=256)
    keys = {**PACKED, "max_steps": 6, "gradient_accumulation_steps": 2}
    straight = make_trainer(tmp_path / "straight", rows, **keys)
    straight.train()
    assert "share_prefix: 60 of 60 rows share 2 prefixes of 40 to 97 tokens" in caplog.text
    saving = {**keys, "save_strategy": "steps", "save_steps": 4}
    with pytest.raises(KilledError):
        make_trainer(tmp_path / "run", rows, callbacks=[KillAfter(5)], **saving).train()
    resumed = make_trainer(tmp_path / "run", rows, resume_from_checkpoint=True, **saving)
    resumed.train()
    assert_same_bits(weights(resumed.model), weights(straight.model))
    with pytest.raises(ValueError, match=r"continued: share_prefix was True, now None"):
        make_trainer(tmp_path / "run", rows, resume_from_checkpoint=True, **{**saving, "share_prefix": False}).train()


def test_shared_prefix_epoch_trains_on_every_row_in_fewer_packs():
    rows = PrefixedRows(60, (40, 97), capacity=256)
    order = build_data_order(make_config("out", **PACKED), rows)
    steps = order.step_batches()
    read = [row for _ in range(order.num_steps(0)) for row in next(steps).row_indices]
    assert sorted(read) == list(range(60))
    assert 3 * order.num_steps(0) < build_data_order(make_config("out", **PACKED | OFF), rows).num_steps(0)
    computed, total = (
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) of ([\d,]+) pos", order.describe_prefixes())[0]
    )
    assert total == rows.lengths.sum() and computed == order.plan.num_positions(order.plan.packs(0)) < total / 2


@pytest.mark.parametrize(
    ("model", "adapter", "problem"),
    [
        (TINY_LLAMA, ReFTConfig(), r"share_prefix: the adapter changes positions .* \(reft\); set share_prefix: false"),
        (
            {**EXPERTS, "router_aux_loss_coef": 0.01, "output_router_logits": True},
            None,
            "auxiliary loss of the experts",
        ),
    ],
)
def test_shared_prefix_with_a_model_that_counts_positions_is_an_error(model, adapter, problem):
    config = dataclasses.replace(make_config("out", **PACKED), peft=adapter)
    with pytest.raises(ValueError, match=problem):
        adapt_model(from_config(model), config)
    plain = dataclasses.replace(make_config("out", **PACKED | OFF), peft=adapter)
    adapt_model(from_config(model), plain)
