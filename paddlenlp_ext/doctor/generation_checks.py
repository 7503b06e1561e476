"""Checks of decoding: generate tokens greedily on a target, and score them with a reference forward pass on the CPU.

If the two largest logits are nearly equal, targets may choose different tokens, so tokens are not compared. Instead,
the reference logit of each generated token must be close to the largest reference logit at its position.
"""

from __future__ import annotations

import functools

import numpy as np
import paddle

from paddlenlp_ext.doctor.backends import reference_ops
from paddlenlp_ext.doctor.check import Check, Difference
from paddlenlp_ext.doctor.devices_and_dtypes import Target, on_device, paddle_dtype
from paddlenlp_ext.doctor.tiny_run import TINY_MODEL
from paddlenlp_ext.doctor.training_checks import LIMITS, REFERENCE
from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears

AREA = "generation"
FORMATS = {"unquantized": None, **{algo: algo for algo in ("nf4", "weight_only_int8", "weight_only_int4")}}
PROMPTS = [[5, 17, 3, 80, 44], [7, 2, 61], list(range(1, 40))]
NEW_TOKENS = 8


def generation_checks(target: Target) -> list[Check]:
    """Return one check per weight format for a target."""
    return [
        Check(AREA, name, target, LIMITS[target.dtype], functools.partial(measure_generation, name, target))
        for name in FORMATS
    ]


def measure_generation(name: str, target: Target) -> Difference:
    """Return the largest gap between a generated token's reference logit and the largest reference logit.

    The gap is relative to the largest magnitude of the logits.
    """
    with on_device(target.device):
        answers = generate(_model(name, target, target.dtype), PROMPTS, max_new_tokens=NEW_TOKENS)
    largest = Difference(0.0, "")
    with on_device(REFERENCE.device), reference_ops(), paddle.no_grad():
        model = _model(name, REFERENCE, target.dtype)
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True), start=1):
            logits_SV = model(paddle.to_tensor([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :].numpy()
            chosen_S, best_S = logits_SV[np.arange(len(answer)), answer], logits_SV.max(axis=1)
            at = int(np.argmax(best_S - chosen_S))
            place = (
                f"prompt {number}, token {at + 1} is {answer[at]}: the token's logit is {chosen_S[at]:.6g}, but the "
                f"largest logit is {best_S[at]:.6g}"
            )
            largest = max(largest, Difference(float((best_S - chosen_S)[at] / np.abs(logits_SV).max()), place))
    return largest


def _model(name: str, target: Target, rounded_to: str) -> CausalLM:
    """Return a tiny model on the current device, with weights that are rounded to `rounded_to` and then quantized.

    Args:
        name: weight format, a key of `FORMATS`.
        target: target whose dtype the model gets.
        rounded_to: dtype to which weights are rounded, so that models in two dtypes have equal weights.
    """
    model = AutoModelForCausalLM.from_config(TINY_MODEL, seed=1, dtype=target.dtype)
    for parameter in model.parameters():
        parameter.set_value(parameter.astype(paddle_dtype(rounded_to)).astype(parameter.dtype))
    if FORMATS[name] is not None:
        quantize_linears(model, QuantizationConfig(algo=name))
    model.eval()
    return model
