"""Checks of training, generation and layouts by the doctor."""

from __future__ import annotations

import importlib
import re

import pytest

from paddlenlp_ext.doctor import generation_checks
from paddlenlp_ext.doctor.check import Check, run_checks
from paddlenlp_ext.doctor.devices_and_dtypes import CPU_TARGETS, GPU_TARGETS
from paddlenlp_ext.doctor.generation_checks import measure_generation
from paddlenlp_ext.doctor.parallel_layout_checks import layout_checks, layout_target
from paddlenlp_ext.doctor.training_checks import LIMITS, measure_training, training_checks, training_runs
from paddlenlp_ext.ops.dispatch import anywhere
from paddlenlp_ext.ops.gates import swiglu_op
from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.doctor.test_op_checks import double_gradient

FP32 = CPU_TARGETS[0]


def test_training_of_a_broken_gradient_differs(monkeypatch: pytest.MonkeyPatch):
    assert measure_training("lora over nf4", FP32).relative <= LIMITS["float32"]
    with monkeypatch.context() as patched:
        patched.setattr(swiglu_op, "_chosen", {})
        patched.setattr(swiglu_op, "_backends", {"reference": (double_gradient, anywhere)})
        difference = measure_training("lora over nf4", FP32)
    assert difference.relative > 10 * LIMITS["float32"]
    assert re.fullmatch(r"gradient norm of step [12]: [\d.]+ instead of [\d.]+", difference.place)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("dpo", "paddlenlp_ext.trainer.objectives.dpo_objective.answer_logps"),
        ("reward model", "paddlenlp_ext.trainer.objectives.reward_objective.answer_scores"),
    ],
)
def test_training_on_pairs_with_other_scores_differs(monkeypatch: pytest.MonkeyPatch, name: str, place: str):
    assert measure_training(name, FP32).relative <= LIMITS["float32"]
    module, _, function = place.rpartition(".")
    score = getattr(importlib.import_module(module), function)
    monkeypatch.setattr(place, lambda *arguments: score(*arguments) * 1.02)
    assert measure_training(name, FP32).relative > 5 * LIMITS["float32"]


def test_training_checks_run_methods_in_a_second_dtype_late():
    early = {check.name for check in training_checks(CPU_TARGETS[1]) if not check.is_late}
    assert {"full", "lora", "dpo", "lora over nf4"} <= early and "use_dora" not in early
    assert not any(check.is_late for check in training_checks(FP32))


def test_training_checks_have_every_method_and_16_bit_weights_in_half_precision_only():
    names = {target.dtype: {check.name for check in training_checks(target)} for target in CPU_TARGETS}
    assert {run.switch for run in training_runs().values()} == {None, *PEFT_METHODS.names()}
    in_16_bits = {f"full, 16-bit weights{kind}" for kind in ("", ", stochastic rounding", ", fp32 gradients")}
    assert names["bfloat16"] - names["float32"] == in_16_bits


def test_training_checks_offload_optimizer_state_on_a_gpu_only():
    targets = [target for target in (*CPU_TARGETS, *GPU_TARGETS) if offloads(training_checks(target))]
    assert targets == list(GPU_TARGETS)


def offloads(checks: list[Check]) -> bool:
    return any(check.name == "full, offloaded optimizer state" for check in checks)


def test_generation_of_tokens_that_are_not_the_best_differs(monkeypatch: pytest.MonkeyPatch):
    assert measure_generation("unquantized", FP32).relative <= LIMITS["float32"]
    generate = generation_checks.generate

    def another_last_token(model, prompts, **options):
        answers = generate(model, prompts, **options)
        return [*answers[:-1], [*answers[-1][:-1], (answers[-1][-1] + 1) % model.config.vocab_size]]

    monkeypatch.setattr(generation_checks, "generate", another_last_token)
    difference = measure_generation("unquantized", FP32)
    assert difference.relative > LIMITS["float32"]
    assert re.match(
        r"prompt 3, token 8 is \d+: the token's logit is [-\d.]+, but the largest logit is [\d.]+$", difference.place
    )


@pytest.mark.layouts
def test_layout_checks_pass_on_two_processes():
    results = list(run_checks(layout_checks(layout_target())))
    assert {result.check.name: result.error for result in results if not result.passed} == {}
    assert len(results) == 7
