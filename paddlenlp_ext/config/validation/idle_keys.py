"""Notes about keys that are set beside another one which makes them idle."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.config.parse_state import ParseState
from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.config.validation.precision import BLOCKWISE_KEYS
from paddlenlp_ext.config.validation.registry import Checks

check = Checks()
_DRAWING = ("top_k", "top_p", "temperature")
# keys, the key that makes them idle, the values with which it does, why
_IDLE: tuple[tuple[tuple[str, ...], str, tuple[Any, ...], str], ...] = (
    (
        ("save_generation_output", "max_new_tokens", *_DRAWING),
        "eval_with_do_generation",
        (False,),
        "eval_with_do_generation is false",
    ),
    (_DRAWING[1:], "top_k", (1,), "top_k 1 always takes the likeliest token"),
    (("eval_steps",), "evaluation_strategy", ("no", "epoch"), "evaluation_strategy is not steps"),
    (("save_steps",), "save_strategy", ("no", "epoch"), "save_strategy is not steps"),
    (("sequence_parallel",), "tensor_parallel_degree", (-1, 0, 1), "tensor_parallel_degree is off"),
    (
        ("recompute_granularity", "refined_recompute", "no_recompute_layers"),
        "recompute",
        (False,),
        "recompute is false",
    ),
    (("neftune_noise_alpha",), "neftune", (False,), "neftune is false"),
    (BLOCKWISE_KEYS, "weight_quantize_algo", (None,), "weight_quantize_algo is off"),
    (BLOCKWISE_KEYS[2:], "weight_double_quant", (False,), "weight_double_quant is false"),
)


@check()
def _idle_keys(_config: RunConfig, given: ParseState) -> None:
    noted: set[str] = set()
    for keys, switch, values, why in _IDLE:
        for key in keys:
            is_set = given.value(key) != given.known.options[key].default
            if is_set and given.value(switch) in values and noted.union(given.broken).isdisjoint((key, switch)):
                given.note(f"{key} has no effect: {why}", key)
                noted.add(key)
