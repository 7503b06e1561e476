"""Reward models: scores, loss and gradients against TRL, shared prompts, splits of a batch, resumed runs."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.config.sections.reward import RewardConfig
from paddlenlp_ext.data.preference.collate_reward_pairs import collate_reward_pairs
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.init_weights import initialize_weights
from paddlenlp_ext.models.sequence_classifier import SequenceClassifier, classifier_config
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.trainer.forward_backward import SequentialSchedule, hidden_states
from paddlenlp_ext.trainer.objectives.reward_objective import RewardObjective, answer_scores
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.golden import set_golden_weights
from tests.common.models import TINY_LLAMA
from tests.common.training import KillAfter, KilledError, RewardRows, Tokenizer, assert_same_bits, make_config, weights
from tests.golden import DATA
from tests.golden.cases.model_cases import CASES
from tests.golden.cases.preference_training_cases import MODEL, SIZES, make_pairs
from tests.golden.cases.reward_cases import FAMILIES, LOSSES, PAD_TOKEN_ID

GOLDEN = np.load(DATA / "reward.npz")
PLAIN = {"center_rewards_coefficient": 0.0}
CENTERED = {"center_rewards_coefficient": 0.01}


def classifier(config: dict) -> SequenceClassifier:
    return SequenceClassifier(classifier_config(DecoderConfig.from_dict(config), config))


def golden_model(case: str = MODEL) -> SequenceClassifier:
    model = classifier({**CASES[case], "pad_token_id": PAD_TOKEN_ID})
    set_golden_weights(model, case)
    return model


def golden_rows(share_prompt: bool = True, margins: tuple[float, ...] = (0.0, 0.0, 0.0)) -> list[TokenizedPair]:
    rows = []
    for index, (prompt, chosen, rejected) in enumerate(make_pairs()):
        tokens = np.concatenate([prompt, chosen, rejected]).astype(np.int32)
        starts, mask = (len(prompt), len(prompt) + len(chosen)), np.arange(len(tokens)) >= len(prompt)
        pair = TokenizedPair(tokens, mask, index, starts, (True, False), share_prompt, True, margins[index])
        rows.append(pair)
    return rows


def scores_of(model, rows, **options) -> np.ndarray:
    batch = collate_reward_pairs([rows], **options)
    return answer_scores(model, hidden_states(model, batch), batch).numpy()


def loss_and_gradients(model, rows, **options) -> tuple[float, dict[str, np.ndarray], dict[str, float]]:
    batch = collate_reward_pairs([rows], unscored_token_id=PAD_TOKEN_ID)
    objective = RewardObjective(make_config("unused", **{**PLAIN, **options}), model)
    loss, sums = objective.measure(model, hidden_states(model, batch), batch)
    loss = loss / objective.num_units(batch)
    loss.backward()
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}
    model.clear_gradients()
    return float(loss), gradients, objective.step_metrics(sums)


def make_model(lora: bool, **fields) -> object:
    model = classifier({**TINY_LLAMA, "pad_token_id": 0})
    initialize_weights(model, 1, TINY_LLAMA["initializer_range"])
    return get_peft_model(model, LoRAConfig(rank=4, **fields)) if lora else model


def make_trainer(folder, rows, lora=True, callbacks=(), dev=None, **keys) -> Trainer:
    model = make_model(lora, **({"dropout": 0.2} if lora else {}))
    config = make_config(folder, **{**CENTERED, "num_train_epochs": 2.0, **keys})
    schedule, objective = SequentialSchedule(model), RewardObjective(config, model)
    return Trainer(
        model, config, rows, dev, Tokenizer(), callbacks=callbacks, forward_backward=schedule, objective=objective
    )


# -- against transformers and TRL -------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", FAMILIES)
def test_scores_match_transformers(case):
    found = scores_of(golden_model(case), golden_rows(), unscored_token_id=PAD_TOKEN_ID)
    np.testing.assert_allclose(found.reshape(-1, 2), GOLDEN[f"scores/{case}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("case", LOSSES)
def test_reward_loss_metrics_and_gradients_match_trl(case, share_prompt):
    options = dict(LOSSES[case])
    rows = golden_rows(share_prompt, options.pop("margins", (0.0, 0.0, 0.0)))
    loss, gradients, metrics = loss_and_gradients(golden_model(), rows, **options)
    assert loss == pytest.approx(float(GOLDEN[f"{case}/loss"]), rel=1e-5)
    assert set(metrics) == {"accuracy", "margin", "mean_reward", "min_reward", "max_reward"}
    for name, value in metrics.items():
        assert value == pytest.approx(float(GOLDEN[f"{case}/{name}"]), rel=1e-5, abs=1e-6), name
    for name, found in gradients.items():
        if f"{case}/gradient:{name}" in GOLDEN:
            expected = GOLDEN[f"{case}/gradient:{name}"]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=name)


# -- layouts of a batch -----------------------------------------------------------------------------------------------
def test_shared_prompts_give_loss_and_gradients_of_separate_rows():
    shared = loss_and_gradients(golden_model(), golden_rows(True), center_rewards_coefficient=0.05)
    separate = loss_and_gradients(golden_model(), golden_rows(False), center_rewards_coefficient=0.05)
    assert shared[0] == pytest.approx(separate[0], abs=1e-6)
    # A gradient is a sum over at most n tokens. Rounding changes a float32 sum of n products by at most n/2 epsilons,
    # relative to the sum of the magnitudes (Higham 2002, section 3.1). Two such sums differ by at most n epsilons.
    num_tokens = sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in SIZES)
    tolerance = num_tokens * np.finfo(np.float32).eps
    for name, expected in separate[1].items():
        assert np.abs(shared[1][name] - expected).max() <= tolerance * np.abs(expected).max(), name


def test_score_does_not_depend_on_the_other_answer():
    rows, model = golden_rows(), golden_model()
    prompt, chosen, rejected = make_pairs()[0]
    other = np.concatenate([prompt, chosen, (rejected + 1) % 5, [3, 1, 4]]).astype(np.int32)
    mask = np.arange(len(other)) >= len(prompt)
    changed = TokenizedPair(other, mask, 0, rows[0].answer_starts, (True, False), scores_last_tokens=True)
    before, after = (scores_of(model, [row, *rows[1:]]) for row in (rows[0], changed))
    assert before[1] != after[1]
    # A matmul over another number of rows may round in another way.
    np.testing.assert_allclose(np.delete(before, 1), np.delete(after, 1), rtol=1e-6)


def test_score_is_that_of_the_answer_alone_and_of_its_last_token():
    model, (prompt, chosen, _) = golden_model(), make_pairs()[2]
    tokens = paddle.to_tensor(np.concatenate([prompt, chosen])[None])
    alone = model(tokens).numpy()[0, :, 0]
    np.testing.assert_allclose(scores_of(model, golden_rows()[2:])[0], alone[-1], rtol=0, atol=1e-6)
    skipping = scores_of(model, golden_rows()[2:], unscored_token_id=int(chosen[-1]))[0]
    np.testing.assert_allclose(skipping, alone[-2], rtol=0, atol=1e-6)


def test_reward_step_does_not_depend_on_the_micro_batches(tmp_path):
    rows, runs = RewardRows(8, tmp_path / "rows"), []
    for number, (batch_size, accumulation) in enumerate(((8, 1), (2, 4))):
        keys = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation, "max_steps": 2}
        keys["adam_epsilon"] = 1e-4  # near zero, Adam would turn rounding into a full step
        trainer = make_trainer(tmp_path / str(number), rows, False, **keys)
        trainer.train()
        runs.append((trainer.state.log_history, weights(trainer.model)))
    for entry, expected in zip(runs[0][0], runs[1][0], strict=True):
        for name in ("loss", "grad_norm", "accuracy", "margin", "mean_reward"):
            assert entry[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name
    for name, value in runs[0][1].items():
        np.testing.assert_allclose(runs[1][1][name], value, rtol=0, atol=2e-5, err_msg=name)


# -- runs -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
def test_reward_training_ranks_the_answers_of_train_and_dev_rows(tmp_path, lora):
    rows = RewardRows(12, tmp_path / "rows")
    keys = {"num_train_epochs": 8.0, "learning_rate": 1e-2, "zero_padding": True, "max_length": 64}
    trainer = make_trainer(tmp_path / "run", rows, lora, dev=rows, **keys)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == 1 and metrics["eval_margin"] > 1 and metrics["eval_loss"] < 0.4
    assert metrics["eval_num_rows"] == 12 and metrics["eval_min_reward"] < metrics["eval_max_reward"]


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
def test_reward_run_resumes_with_the_same_bits(tmp_path, lora):
    rows = RewardRows(14, tmp_path / "rows")
    keys = {"max_length": 64, "max_steps": 6, "zero_padding": True, "per_device_train_batch_size": 1}
    straight = make_trainer(tmp_path / "straight", rows, lora, **keys)
    straight.train()
    keys = {**keys, "save_strategy": "steps", "save_steps": 4}
    with pytest.raises(KilledError):
        make_trainer(tmp_path / "run", rows, lora, callbacks=[KillAfter(5)], **keys).train()
    resumed = make_trainer(tmp_path / "run", rows, lora, resume_from_checkpoint=True, **keys)
    resumed.train()
    assert_same_bits(weights(resumed.model), weights(straight.model))
    assert resumed.state.log_history[-1]["loss"] == straight.state.log_history[-1]["loss"]


def test_reward_options_have_no_weight_by_default():
    assert (RewardConfig().center_rewards_coefficient, RewardConfig().regularization) == (0, 0)
