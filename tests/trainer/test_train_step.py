"""Optimizer steps: equal updates for every split of a global batch, and the assignment of micro-batches to ranks."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from paddlenlp_ext.data.collate import build_collate
from paddlenlp_ext.data.packing import attention_cost
from paddlenlp_ext.data.sampler import build_data_order
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.trainer import train_step
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from paddlenlp_ext.trainer.single_process import SingleProcess
from paddlenlp_ext.trainer.train_step import OptimizerStep, StepOptions
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.models import TINY_LLAMA
from tests.common.training import VOCABULARY, Rows, Tokenizer, make_config, make_model, weights

ROWS = Rows(8, seed=3)
ONE_BATCH = {"per_device_train_batch_size": 8}
SPLITS = {
    "2 x 4": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "3 x 3, the last one smaller": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "1 x 8": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "packed in order": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "zero_padding": True},
    "packed greedily": {**ONE_BATCH, "zero_padding": True, "greedy_zero_padding": True},
    "padded to a multiple": {**ONE_BATCH, "pad_to_multiple_of": 64},
    "padded to the full length": {**ONE_BATCH, "pad_to_max_length": True},
    "padded, 4 x 2": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "pad_to_max_length": True,
    },
}


class Steps(Callback):
    """Callback that collects the report of every step."""

    def __init__(self):
        self.reports = []

    def on_step_end(self, state, report):
        self.reports.append(report)


def train(tmp_path, rows=ROWS, lora=False, **keys):
    # A large epsilon makes the update a smooth function of the gradient. Otherwise Adam's first steps are its sign,
    # and a gradient of 1e-9 with the opposite sign would make a full difference.
    model, steps = make_model(lora), Steps()
    config = make_config(tmp_path / "run", adam_epsilon=1e-3, max_grad_norm=0.5, **keys)
    Trainer(model, config, rows, None, Tokenizer(), callbacks=[steps]).train()
    return weights(model), steps.reports


@pytest.fixture(scope="module")
def one_batch(tmp_path_factory):
    return train(tmp_path_factory.mktemp("one_batch"), num_train_epochs=3.0, **ONE_BATCH)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_optimizer_step_any_split_makes_the_same_update(tmp_path, one_batch, split):
    want, want_reports = one_batch
    got, reports = train(tmp_path, num_train_epochs=3.0, **split)
    assert len(reports) == len(want_reports) == 3
    for name, value in want.items():
        assert np.abs(got[name] - value).max() <= 1e-6, name
    for report, expected in zip(reports, want_reports, strict=True):
        assert report.loss == pytest.approx(expected.loss, abs=2e-6)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert (report.num_target_tokens, report.num_tokens, report.num_rows) == (
            sum(int(row.loss_mask[1:].sum()) for row in ROWS.rows),
            int(ROWS.lengths.sum()),
            8,
        )


def test_optimizer_step_loss_is_the_mean_over_target_tokens(tmp_path):
    model = make_model()
    total, count = 0.0, 0
    for row in ROWS.rows:
        with paddle.no_grad():
            logits = model(paddle.to_tensor(row.tokens[None, :-1].astype("int64"))).numpy()[0].astype("float64")
        log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        targets = row.tokens[1:]
        total -= log_probabilities[np.arange(len(targets)), targets][row.loss_mask[1:]].sum()
        count += int(row.loss_mask[1:].sum())
    _, reports = train(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=5)
    assert reports[0].loss == pytest.approx(total / count, rel=1e-6)


EXPERTS = {
    **TINY_LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 5,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


def train_experts(tmp_path, changes, **keys):
    model, steps = AutoModelForCausalLM.from_config({**EXPERTS, **changes}, seed=1), Steps()
    Trainer(model, make_config(tmp_path, max_steps=1, **keys), ROWS, None, Tokenizer(), callbacks=[steps]).train()
    return steps.reports[0]


def test_optimizer_step_adds_the_routers_loss_of_each_micro_batch_by_its_target_tokens(tmp_path):
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    model = AutoModelForCausalLM.from_config(EXPERTS, seed=1)
    batch = next(build_data_order(make_config(tmp_path, **split), ROWS).step_batches())
    total = targets = 0.0
    for packs in batch.micro_batches:
        collated = build_collate(ROWS, make_config(tmp_path).data, 0, VOCABULARY)(packs)
        with paddle.no_grad():
            model.hidden_states(paddle.to_tensor(collated.input_ids), document_lengths=collated.document_lengths)
        total += float(model.load_balance.loss) * collated.num_target_tokens
        targets += collated.num_target_tokens
    with_loss = train_experts(tmp_path / "a", {}, **split)
    without = train_experts(tmp_path / "b", {"output_router_logits": False}, **split)
    assert with_loss.loss - without.loss == pytest.approx(total / targets, rel=1e-4)
    assert with_loss.metrics["expert_imbalance"] == without.metrics["expert_imbalance"] >= 1.0


def test_optimizer_step_with_experts_ignores_padding(tmp_path):
    plain = train_experts(tmp_path / "a", {}, **ONE_BATCH)
    padded = train_experts(tmp_path / "b", {}, **ONE_BATCH, pad_to_max_length=True)
    assert padded.loss == pytest.approx(plain.loss, rel=1e-5)
    assert padded.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    assert padded.metrics == plain.metrics


def test_optimizer_step_partial_last_batch_is_a_full_step(tmp_path):
    # 10 rows in global batches of 4: 4 + 4 + 2 in each epoch. The last batch is normalized by its own tokens.
    rows = Rows(10, seed=4)
    split, reports = train(tmp_path / "a", rows, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                           num_train_epochs=2.0)  # fmt: skip
    full, expected = train(tmp_path / "b", rows, per_device_train_batch_size=4, num_train_epochs=2.0)
    assert [report.num_rows for report in reports] == [4, 4, 2, 4, 4, 2] == [r.num_rows for r in expected]
    for name, value in full.items():
        assert np.abs(split[name] - value).max() <= 1e-6, name


def test_optimizer_step_frozen_weights_keep_their_bits(tmp_path):
    model = make_model(lora=True)
    before, learns = weights(model), set(trainable_parameters(model))
    Trainer(model, make_config(tmp_path, weight_decay=0.1), ROWS, None, Tokenizer()).train()
    after = weights(model)
    assert 0 < len(learns) < len(before)
    for name, value in before.items():
        assert np.array_equal(after[name], value) == (name not in learns), name
    # A gradient of zero would make AdamW update a parameter that a resumed run, without gradient, would not.
    assert all(parameter.grad is None for parameter in model.parameters())


def test_optimizer_step_repeated_lowers_the_loss(tmp_path):
    _, reports = train(tmp_path, num_train_epochs=30.0, learning_rate=1e-2, **ONE_BATCH)
    assert reports[-1].loss < 0.5 * reports[0].loss
    assert all(math.isfinite(report.loss) for report in reports)


class RankOf(SingleProcess):
    """Process group that takes one rank's micro-batches, without communication."""

    def __init__(self, index, size):
        self.index, self.size = index, size


def test_optimizer_step_assigns_micro_batches_by_cost(tmp_path):
    rows, config = Rows(8, seed=5), make_config(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    step_batch = next(build_data_order(config, rows, num_ranks=2).step_batches())
    taken = [rows_taken_by(RankOf(index, 2), step_batch, rows, config) for index in range(2)]
    assert sorted(taken[0] + taken[1]) == sorted(step_batch.row_indices)
    assert taken[0] == [row for pack in step_batch.local_micro_batches(0, 2).values() for (row,) in pack]
    alternating = (step_batch.row_indices[::2], step_batch.row_indices[1::2])
    uneven = [largest_over_mean(shares, rows) for shares in (taken, alternating)]
    assert uneven[0] < 1.1 < uneven[1]


def test_optimizer_step_seeds_micro_batches_by_their_number_in_the_global_batch(tmp_path, monkeypatch):
    """Check that two ranks draw what one process draws, and not both the numbers of micro-batches 0 and 1."""
    rows, config = Rows(8, seed=5), make_config(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    step_batch = next(build_data_order(config, rows, num_ranks=2).step_batches())
    seeded = []
    monkeypatch.setattr(train_step, "seed_micro_batch", lambda model, *position: seeded.append(position))
    for index in range(2):
        rows_taken_by(RankOf(index, 2), step_batch, rows, config)
    local = [step_batch.local_micro_batches(index, 2) for index in range(2)]
    assert seeded == [(0, 0, number) for numbers in local for number in numbers]
    assert sorted(number for _, _, number in seeded) == [0, 1, 2, 3]


def rows_taken_by(process_group, step_batch, rows, config):
    model, taken = make_model(), []
    collate = build_collate(rows, config.data, pad_token_id=0, vocab_size=VOCABULARY)

    def collate_and_record(packs, epoch):
        taken.extend(row for pack in packs for row in pack)
        return collate(packs, epoch)

    options = StepOptions(seed=0, max_grad_norm=1.0, total_steps=1)
    optimizer = build_optimizer(model, config.optim)
    OptimizerStep(model, optimizer, collate_and_record, process_group, options).run(step_batch, 0, 1e-3)
    return taken


def largest_over_mean(shares, rows):
    costs = [attention_cost(rows.lengths[share]) for share in shares]
    return max(costs) / (sum(costs) / len(costs))
