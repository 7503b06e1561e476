"""Preference training: loss and gradients against TRL, splits of a batch, the reference model, resumed runs."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.checksum_manifest import write_manifest
from paddlenlp_ext.data.preference.collate_pairs import collate_pairs, mismatched_rows
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.trainer.forward_backward import SequentialSchedule, hidden_states
from paddlenlp_ext.trainer.objectives import dpo_objective
from paddlenlp_ext.trainer.objectives.dpo_objective import PreferenceObjective
from paddlenlp_ext.trainer.objectives.reference_model import fingerprint
from paddlenlp_ext.trainer.single_process import SingleProcess
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import (
    KillAfter,
    KilledError,
    PreferenceRows,
    Tokenizer,
    assert_same_bits,
    make_config,
    make_model,
    weights,
)
from tests.golden import DATA
from tests.golden.cases.model_cases import CASES, make_weight
from tests.golden.cases.preference_training_cases import LOSSES, MODEL, make_pairs, make_reference

LORA = {"lora": True, "dropout": 0.2}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def golden_model() -> CausalLM:
    model = CausalLM(DecoderConfig.from_dict(CASES[MODEL]))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight(MODEL, name, tuple(parameter.shape)))
    return model


def golden_rows(share_prompt: bool) -> list[TokenizedPair]:
    rows = []
    for index, (prompt, chosen, rejected) in enumerate(make_pairs()):
        tokens = np.concatenate([prompt, chosen, rejected]).astype(np.int32)
        starts = (len(prompt), len(prompt) + len(chosen))
        loss_mask = np.arange(len(tokens)) >= len(prompt)
        rows.append(TokenizedPair(tokens, loss_mask, index, starts, (True, False), share_prompt))
    return rows


def make_objective(model, folder, **keys) -> PreferenceObjective:
    config = make_config(folder, **{"loss_type": "sigmoid", **keys})
    return PreferenceObjective(config, model, SequentialSchedule(model), SingleProcess())


def make_trainer(folder, rows, model_options=LORA, callbacks=(), dev=None, **keys) -> Trainer:
    model = make_model(**model_options)
    config = make_config(folder, **{"loss_type": "sigmoid", "num_train_epochs": 2.0, **keys})
    schedule = SequentialSchedule(model)
    objective = PreferenceObjective(config, model, schedule, SingleProcess())
    return Trainer(
        model, config, rows, dev, Tokenizer(), callbacks=callbacks, forward_backward=schedule, objective=objective
    )


def logps_of(model, row: TokenizedPair) -> np.ndarray:
    """Compute the answers' log-probabilities of a row from the logits of separate sequences, in double precision."""
    found = []
    model.eval()
    for tokens, loss_mask in row.answers:
        ids = np.concatenate([row.prompt, tokens])
        with paddle.no_grad():
            logits = model(paddle.to_tensor(ids[None, :-1].astype(np.int64))).numpy()[0].astype(np.float64)
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        picked = logps[np.arange(len(ids) - 1), ids[1:]][len(row.prompt) - 1 :]
        found.append((picked * loss_mask).sum())
    return np.array(found)


# -- loss and gradients -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_preference_loss_and_gradients_match_trl(loss_type, share_prompt, tmp_path):
    golden, model = np.load(DATA / "preference_training.npz"), golden_model()
    objective = make_objective(model, tmp_path, loss_type=loss_type, **LOSSES[loss_type])
    batch = collate_pairs([golden_rows(share_prompt)], reference_logps=make_reference())
    loss, sums = objective.measure(model, hidden_states(model, batch), batch)
    loss = loss / objective.num_units(batch)
    loss.backward()
    assert float(loss) == pytest.approx(float(golden[f"{loss_type}/loss"]), rel=1e-5)
    for name, value in objective.step_metrics(sums).items():
        if f"{loss_type}/{name}" in golden:
            # a margin is the difference of two rewards, and has their rounding
            assert value == pytest.approx(float(golden[f"{loss_type}/{name}"]), rel=1e-5, abs=3e-6), name
    if loss_type == "sigmoid":
        for name, parameter in model.named_parameters():
            expected = golden[f"gradient:{name}"]
            np.testing.assert_allclose(parameter.grad.numpy(), expected, rtol=0, atol=1e-5, err_msg=name)


def test_preference_step_does_not_depend_on_the_micro_batches(tmp_path):
    rows = PreferenceRows(8, tmp_path / "rows")
    runs = []
    for number, (batch_size, accumulation) in enumerate(((8, 1), (2, 4), (3, 3))):
        keys = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation, "max_steps": 2}
        keys["adam_epsilon"] = 1e-4  # near zero, Adam would turn rounding into a full step
        trainer = make_trainer(tmp_path / str(number), rows, {"lora": True}, sft_loss_ratio=0.5, **keys)
        trainer.train()
        runs.append((trainer.state.log_history, weights(trainer.model)))
    names = ("loss", "grad_norm", "rewards/margins", "rewards/accuracies", "logps/rejected", "nll_loss")
    for history, trained in runs[1:]:
        for entry, expected in zip(history, runs[0][0], strict=True):
            # Before the first update the rewards are 0 but for rounding, whose sign decides the accuracy.
            for name in names if entry["step"] > 1 else set(names) - {"rewards/accuracies"}:
                assert entry[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name
        for name, value in runs[0][1].items():
            np.testing.assert_allclose(trained[name], value, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("model_options", [LORA, {}], ids=["LoRA", "full"])
def test_preference_training_raises_margin_and_accuracy_of_train_and_dev_rows(tmp_path, model_options):
    rows = PreferenceRows(12, tmp_path / "rows")
    trainer = make_trainer(tmp_path / "run", rows, model_options, dev=rows, num_train_epochs=6.0, learning_rate=5e-3)
    results = trainer.train()
    first, *_, last = trainer.state.log_history
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["rewards/margins"] > 0.3 and last["rewards/accuracies"] == 1 and last["loss"] < 0.6
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
    assert results["train_loss"] < first["loss"]
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/accuracies"] == 1 and metrics["eval_loss"] < 0.6
    expected = np.array([logps_of(trainer.model, row) for row in rows])
    assert metrics["eval_logps/chosen"] == pytest.approx(expected[:, 0].mean(), rel=1e-5)


# -- reference --------------------------------------------------------------------------------------------------------
def test_reference_logps_are_those_of_the_starting_model_and_are_computed_once(tmp_path, monkeypatch):
    rows, model = PreferenceRows(5, tmp_path / "rows"), make_model()
    collate = make_objective(model, tmp_path / "a", per_device_eval_batch_size=2).build_collate(rows, 0, 61)
    batch = collate([[0], [3]])
    expected = np.concatenate([logps_of(model, rows[0]), logps_of(model, rows[3])])
    np.testing.assert_allclose(batch.reference_logps, expected, rtol=1e-5)

    passes, compute = [], dpo_objective.answer_logps
    monkeypatch.setattr(dpo_objective, "answer_logps", lambda *inputs: passes.append(1) or compute(*inputs))
    again = make_objective(model, tmp_path / "b", per_device_eval_batch_size=2).build_collate(rows, 0, 61)
    np.testing.assert_array_equal(again([[0], [3]]).reference_logps, batch.reference_logps)
    assert not passes, "the stored log-probabilities must be used"
    make_objective(make_model(seed=2), tmp_path / "c").build_collate(rows, 0, 61)
    assert passes, "another model has other log-probabilities"


def test_reference_logps_that_cannot_be_stored_are_used_and_named_in_the_log(tmp_path, monkeypatch, caplog):
    rows, model = PreferenceRows(3, tmp_path / "rows"), make_model()

    def full_disk(*arguments, **options):
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", full_disk)
    batch = make_objective(model, tmp_path / "a").build_collate(rows, 0, 61)([[1]])
    np.testing.assert_allclose(batch.reference_logps, logps_of(model, rows[1]), rtol=1e-5)
    assert "not stored (no space left)" in caplog.text and "data_cache_dir" in caplog.text


def test_reference_free_loss_uses_no_reference(tmp_path):
    rows, model = PreferenceRows(3, tmp_path / "rows"), make_model()
    objective = make_objective(model, tmp_path, reference_free=True)
    batch = objective.build_collate(rows, 0, 61)([[0, 1, 2]])
    assert batch.reference_logps is None and not list((tmp_path / "rows").iterdir())
    loss, _ = objective.measure(model, hidden_states(model, batch), batch)
    logps = np.array([logps_of(model, row) for row in rows])
    assert float(loss) == pytest.approx(np.log1p(np.exp(-0.1 * (logps[:, 0] - logps[:, 1]))).sum(), rel=1e-5)


def test_reference_follows_the_model_every_update_steps(tmp_path):
    rows = PreferenceRows(12, tmp_path / "rows")
    trainer = make_trainer(tmp_path / "run", rows, {"lora": True}, ref_model_update_steps=2, learning_rate=5e-3)
    trainer.train()
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history]
    assert len(margins) == 6
    np.testing.assert_allclose(margins[::2], 0, atol=1e-4)  # the reference has just been replaced
    assert all(abs(margin) > 1e-3 for margin in margins[1::2])


def test_kto_baseline_is_the_mean_log_ratio_of_mismatched_answers(tmp_path):
    rows, model = PreferenceRows(6, tmp_path / "rows", in_pairs=False), make_model(lora=True)
    objective = make_objective(model, tmp_path, loss_type="kto", beta=0.5)
    collate = objective.build_collate(rows, 0, 61)
    objective.begin()
    start = [logps_of(model, row) for row in rows]
    mismatched = mismatched_rows(rows.rows)
    reference = np.concatenate([logps_of(model, row) for row in mismatched])
    for parameter in model.parameters():
        if not parameter.stop_gradient:
            parameter.set_value(parameter * 1.5 - 0.03)
    (batch,) = objective.prepare([collate([list(range(6))])])
    ratios = np.concatenate([logps_of(model, row) for row in mismatched]) - reference
    assert batch.baseline == pytest.approx(ratios.mean(), rel=1e-3) and batch.baseline > 0.1

    loss, sums = objective.measure(model, hidden_states(model, batch), batch)
    own = np.array([logps_of(model, row) - before for row, before in zip(rows, start, strict=True)])[:, 0]
    signs = np.where(batch.is_desirable, 1, -1)
    expected = 1 - 1 / (1 + np.exp(-0.5 * signs * (own - batch.baseline)))
    assert float(loss) == pytest.approx(expected.sum(), rel=1e-4)
    assert objective.num_units(batch) == 6 and objective.step_metrics(sums)["kl"] == pytest.approx(batch.baseline)


# -- resume -----------------------------------------------------------------------------------------------------------
RECIPES = {
    "sigmoid, packed": {"zero_padding": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    "kto": {"loss_type": "kto"},
    "reference that follows": {"ref_model_update_steps": 3},
    "orpo with noise": {"loss_type": "orpo", "neftune": True},
}


@pytest.mark.parametrize("keys", RECIPES.values(), ids=RECIPES.keys())
def test_preference_run_resumes_with_the_same_bits(tmp_path, keys):
    rows = PreferenceRows(14, tmp_path / "rows", in_pairs=keys.get("loss_type") != "kto")
    keys = {**keys, "max_length": 64, "max_steps": 6}
    straight = make_trainer(tmp_path / "straight", rows, **keys)
    straight.train()
    keys = {**keys, "save_strategy": "steps", "save_steps": 4}
    with pytest.raises(KilledError):
        make_trainer(tmp_path / "run", rows, callbacks=[KillAfter(5)], **keys).train()
    resumed = make_trainer(tmp_path / "run", rows, resume_from_checkpoint=True, **keys)
    resumed.train()
    assert_same_bits(weights(resumed.model), weights(straight.model))
    assert [entry["loss"] for entry in resumed.state.log_history] == [
        entry["loss"] for entry in straight.state.log_history
    ]


def test_resume_with_another_loss_or_without_the_reference_model_is_an_error(tmp_path):
    rows, folder = PreferenceRows(8, tmp_path / "rows"), tmp_path / "run" / "checkpoint-1"
    make_trainer(tmp_path / "run", rows, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=r"a different objective: beta was 0\.\d+, now 7"):
        make_trainer(tmp_path / "run", rows, max_steps=2, resume_from_checkpoint=True, beta=7.0).train()
    (folder / "run_config.json").write_text("{}")  # as if an earlier version had no such key
    write_manifest(folder, 1)
    with pytest.raises(ValueError, match="no weights of the reference model"):
        make_trainer(tmp_path / "run", rows, max_steps=2, resume_from_checkpoint=True, ref_model_update_steps=1).train()


def test_fingerprint_of_the_reference_depends_on_weights_and_positions():
    plain = make_model(seed=1)
    linear = type(plain)(DecoderConfig.from_dict({**plain.config.source, "rope_scaling": LINEAR}))
    linear.set_state_dict(plain.state_dict())
    found = [fingerprint(model, ("float32",), SingleProcess()) for model in (plain, linear, make_model(seed=2))]
    assert len(set(found)) == 3
    assert fingerprint(make_model(seed=1), ("float32",), SingleProcess()) == found[0]
