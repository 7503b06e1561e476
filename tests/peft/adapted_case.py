"""A method over a tiny model of a family, plain or quantized; models that no test changes are built once per case."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantizable_layers, quantize_linears
from tests.common.adapters import default_config, logits_of, tiny_model, train

TOLERANCE = 1e-5
_TOLERANCES = {"gated_delta": 4e-5, "split_delta": 4e-5}
"""Tolerances of other families. Half a unit in the last place of every weight changes these logits by up to 1.3e-5."""
ALGOS = {
    "nf4": QuantizationConfig(algo="nf4", double_quant=True),
    "int8": QuantizationConfig(algo="weight_only_int8"),
}


class Method(NamedTuple):
    """Method with options: `switch` of the registry, and keyword arguments of its config."""

    switch: str
    options: Mapping[str, Any] = MappingProxyType({})

    def config(self, **options: Any) -> PeftConfig:
        return default_config(self.switch, **self.options, **options)


EVERY_METHOD = {switch: Method(switch) for switch in PEFT_METHODS.names()}
METHODS_OF_EXPERTS = {
    **EVERY_METHOD,
    "lora_of_experts": Method(
        "lora", {"target_parameters": ("experts.gate_up_proj", "experts.down_proj", "gate.weight")}
    ),
}


class CaseKey(NamedTuple):
    """Method over a model.

    Attributes:
        name: name of the method in a table of methods.
        method: the method.
        family: key of `tests.common.adapters.MORE_FAMILIES`.
        algo: key of `ALGOS`; None for a model that is not quantized.
    """

    name: str
    method: Method
    family: str
    algo: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.family, self.algo, self.name)))


class Case:
    """Models of a case, built when they are first needed; tests must not change `started` and `trained`."""

    def __init__(self, key: CaseKey) -> None:
        self.name, self.method, self.family, self.algo = key
        self.tolerance = _TOLERANCES.get(self.family, TOLERANCE)

    def base(self, config: PeftConfig | None = None) -> CausalLM:
        """Build the base, quantized for the adapter of `config`, by default the case's."""
        return new_base(self.family, self.algo, config or self.method.config())

    def new(self, seed: int = 42) -> PeftModel:
        """Build the model with a new adapter."""
        config = self.method.config()
        model = get_peft_model(self.base(config), config, seed=seed)
        model.eval()
        return model

    def new_trained(self) -> PeftModel:
        """Build a model with the adapter of `trained`."""
        model, values = self.new(), self._trained_values
        for name, parameter in model.named_parameters():
            if name in values:
                parameter.set_value(values[name])
        return model

    @cached_property
    def started(self) -> PeftModel:
        """Model with a new adapter."""
        paddle.seed(1)
        return self.new()

    @cached_property
    def trained(self) -> PeftModel:
        """Model whose adapter, trained for three steps, changes the logits clearly."""
        model = self.new()
        train(model, steps=3)
        assert np.abs(logits_of(model) - self.started_logits).max() > 100 * self.tolerance
        return model

    @cached_property
    def started_logits(self) -> np.ndarray:
        return logits_of(self.started)

    @cached_property
    def trained_logits(self) -> np.ndarray:
        return logits_of(self.trained)

    @cached_property
    def base_logits(self) -> np.ndarray:
        config = self.method.config()
        quantizes_residual = type(config).before_quantizing is not PeftConfig.before_quantizing
        if self.algo is not None and quantizes_residual:
            return logits_of(self.base(config))
        return base_logits(self.family, self.algo)

    @cached_property
    def _trained_values(self) -> dict[str, np.ndarray]:
        return {name: p.numpy() for name, p in self.trained.named_parameters() if not p.stop_gradient}


def new_base(family: str, algo: str | None, config: PeftConfig) -> CausalLM:
    """Build a tiny model, quantized by `algo` for the adapter of `config`."""
    model = tiny_model(family)
    if algo is not None:
        quantize_linears(model, ALGOS[algo], config.before_quantizing)
        model.eval()
    return model


@functools.cache
def plain_base(family: str) -> CausalLM:
    """Return the tiny model that is not quantized; it must not be changed."""
    return tiny_model(family)


@functools.cache
def base_logits(family: str, algo: str | None = None) -> np.ndarray:
    """Return the logits of a tiny model, quantized by `algo` as for LoRA."""
    return logits_of(plain_base(family) if algo is None else new_base(family, algo, default_config("lora")))


@functools.cache
def num_quantizable(family: str) -> int:
    """Return the number of a model's layers that can be quantized."""
    return len(quantizable_layers(plain_base(family)))


def case_keys(methods: dict[str, Method], families: Iterable[str], algo: str | None = None) -> list[CaseKey]:
    """Return the cases of each method over each family."""
    return [CaseKey(name, method, family, algo) for family in families for name, method in methods.items()]
