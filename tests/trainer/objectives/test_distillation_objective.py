"""Distillation: loss and gradients against TRL, stored log-probabilities, splits of a batch, resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.trainer.forward_backward import hidden_states
from paddlenlp_ext.trainer.objectives.distillation_objective import DistillationObjective
from paddlenlp_ext.trainer.single_process import SingleProcess
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import (
    KillAfter,
    KilledError,
    Rows,
    Tokenizer,
    assert_same_bits,
    make_config,
    make_model,
    weights,
)
from tests.golden import DATA
from tests.golden.cases.distillation_cases import CASES, GRADIENT, make_rows, weight
from tests.golden.cases.model_cases import CASES as MODELS
from tests.golden.cases.model_cases import VOCAB

TEACHER = {"teacher_model_name_or_path": "teacher"}


class GoldenRows(Rows):
    """Rows of the golden file."""

    def __init__(self) -> None:
        rows = make_rows()
        self.rows = [
            EncodedRow(np.array(tokens, np.int32), np.arange(len(tokens)) >= start, index)
            for index, (tokens, start) in enumerate(rows)
        ]
        self.lengths = np.array([row.length for row in self.rows], dtype=np.int64)


def golden_model(role: str, case: str) -> CausalLM:
    model = CausalLM(DecoderConfig.from_dict(MODELS[case]))
    for name, parameter in model.named_parameters():
        parameter.set_value(weight(role, case, name, tuple(parameter.shape)).astype(np.float32))
    model.eval()
    return model


def make_objective(folder: Path, model: Any, teacher: Any, **keys: Any) -> DistillationObjective:
    config = make_config(folder, **TEACHER, **keys)
    return DistillationObjective(config, model, SingleProcess(), None, teacher)


def make_trainer(folder: Path, rows: Any, lora: bool = True, callbacks: Any = (), dev: Any = None, **keys: Any):
    model, teacher = make_model(lora, **({"dropout": 0.2} if lora else {})), make_model(seed=5)
    teacher.eval()
    config = make_config(folder, **TEACHER, **keys)
    objective = DistillationObjective(config, model, SingleProcess(), None, teacher)
    return Trainer(model, config, rows, dev, Tokenizer(), callbacks=callbacks, objective=objective)


def measure(objective: DistillationObjective, model: Any, rows: Any, packs: list[list[int]]) -> tuple[Any, Any]:
    batch = objective.build_collate(rows, 0, VOCAB)(packs)
    loss, sums = objective.measure(model, hidden_states(model, batch), batch)
    return loss / objective.num_units(batch), sums


# -- loss and gradients -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_distillation_loss_and_gradients_match_trl(tmp_path: Path, case: str, packed: bool) -> None:
    golden, options = np.load(DATA / "distillation.npz"), CASES[case]
    student, teacher = golden_model("student", options["student"]), golden_model("teacher", options["teacher"])
    keys = {"distillation_beta": options["beta"], "distillation_temperature": options["temperature"]}
    padding = {} if packed else {"pad_to_max_length": True}
    objective = make_objective(tmp_path, student, teacher, **keys, **padding)
    packs = [[0, 1, 2]] if packed else [[0], [1], [2]]
    loss, _ = measure(objective, student, GoldenRows(), packs)
    loss.backward()
    assert float(loss) == pytest.approx(float(golden[f"{case}/loss"]), rel=1e-5)
    gradients = {name: parameter.grad.numpy() for name, parameter in student.named_parameters()}
    np.testing.assert_allclose(gradients[GRADIENT], golden[f"{case}/gradient"], rtol=0, atol=1e-5)
    norms = [np.linalg.norm(gradients[name]) for name in sorted(gradients)]
    np.testing.assert_allclose(norms, golden[f"{case}/norms"], rtol=1e-4, atol=1e-5)


def test_distillation_step_does_not_depend_on_the_micro_batches(tmp_path: Path) -> None:
    rows, runs = Rows(8), []
    for number, keys in enumerate(
        (
            {"per_device_train_batch_size": 8},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
        )
    ):
        options = {"max_steps": 2, "adam_epsilon": 1e-4, "distillation_sft_ratio": 0.3, "num_train_epochs": 2.0}
        trainer = make_trainer(tmp_path / str(number), rows, lora=False, **options, **keys)
        trainer.train()
        runs.append((trainer.state.log_history, weights(trainer.model)))
    for history, trained in runs[1:]:
        for entry, expected in zip(history, runs[0][0], strict=True):
            for name in ("loss", "grad_norm", "divergence", "cross_entropy"):
                assert entry[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name
        for name, value in runs[0][1].items():
            np.testing.assert_allclose(trained[name], value, rtol=0, atol=2e-5, err_msg=name)


def test_distillation_moves_the_student_towards_the_teacher(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Rows(16), dev=Rows(16), num_train_epochs=6.0, do_eval=True)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] == pytest.approx(after["eval_divergence"], rel=1e-6)
    assert after["eval_divergence"] < 0.9 * before["eval_divergence"]
    assert after["eval_perplexity"] == pytest.approx(np.exp(after["eval_cross_entropy"]))


# -- stored log-probabilities -----------------------------------------------------------------------------------------
def test_stored_log_probabilities_of_all_tokens_have_the_gradient_of_the_teacher(tmp_path: Path) -> None:
    rows, gradients = Rows(6), []
    for path in (None, str(tmp_path / "logps")):
        student, teacher = make_model(seed=1), make_model(seed=5)
        keys = {} if path is None else {"teacher_logps_path": path, "teacher_top_k": student.config.vocab_size}
        objective = make_objective(tmp_path / "run", student, teacher, distillation_temperature=2.0, **keys)
        loss, _ = measure(objective, student, rows, [[4, 1], [0, 5, 2]])
        loss.backward()
        gradients.append(np.concatenate([parameter.grad.numpy().ravel() for parameter in student.parameters()]))
    # The stored log-probabilities are rounded to float16.
    np.testing.assert_allclose(*gradients, rtol=0, atol=2e-3 * np.abs(gradients[0]).max())


def test_stored_log_probabilities_of_top_tokens_have_almost_the_direction_of_the_gradient(tmp_path: Path) -> None:
    rows, gradients = Rows(6), []
    for path in (None, str(tmp_path / "logps")):
        paddle.seed(3)
        student, teacher = make_model(seed=1), make_model(seed=1)
        for parameter in student.parameters():  # a student near the teacher, as after quantization
            parameter.set_value(parameter + 0.02 * paddle.randn(parameter.shape))
        keys = {} if path is None else {"teacher_logps_path": path, "teacher_top_k": 40}
        objective = make_objective(tmp_path / "run", student, teacher, distillation_beta=0.0, **keys)
        loss, _ = measure(objective, student, rows, [[0, 1, 2, 3, 4, 5]])
        loss.backward()
        gradients.append(np.concatenate([parameter.grad.numpy().ravel() for parameter in student.parameters()]))
    cosine = gradients[0] @ gradients[1] / np.linalg.norm(gradients[0]) / np.linalg.norm(gradients[1])
    assert cosine > 0.99


def test_log_probabilities_beyond_float16_are_stored_as_its_minimum(tmp_path: Path) -> None:
    path, vocab_size = tmp_path / "logps", make_model().config.vocab_size
    keys = {"teacher_logps_path": str(path), "teacher_top_k": vocab_size, "distillation_temperature": 1e-6}
    student, rows = make_model(seed=1), Rows(2)
    for beta in (0.0, 0.5, 1.0):
        objective = make_objective(tmp_path / "run", student, make_model(seed=5), **keys, distillation_beta=beta)
        loss, _ = measure(objective, student, rows, [[0, 1]])
        assert np.isfinite(float(loss))
    (logps,) = (np.load(file) for file in path.glob("*/logps.npy"))
    assert logps.min() == np.finfo(np.float16).min


# -- resumed runs -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_stored", [False, True])
def test_resumed_distillation_continues_to_the_same_bits(tmp_path: Path, is_stored: bool) -> None:
    keys = {"teacher_logps_path": str(tmp_path / "logps"), "teacher_top_k": 20} if is_stored else {}
    keys |= {"num_train_epochs": 2.0, "save_strategy": "steps", "save_steps": 2}
    expected = make_trainer(tmp_path / "uninterrupted", Rows(16), **keys)
    expected.train()
    with pytest.raises(KilledError):
        make_trainer(tmp_path / "killed", Rows(16), callbacks=[KillAfter(3)], **keys).train()
    resumed = make_trainer(tmp_path / "killed", Rows(16), resume_from_checkpoint=True, **keys)
    resumed.train()
    assert_same_bits(weights(resumed.model), weights(expected.model))
