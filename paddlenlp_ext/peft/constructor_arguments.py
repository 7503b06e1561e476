"""Constructor arguments of adapter configs, and their aliases.

Every option is a field of the config. If Hugging Face PEFT has the option, the field has PEFT's name. The constructor
accepts an option under any of these names:

| name | example |
| --- | --- |
| field | `r` |
| key in a run's JSON file, and its aliases | `lora_rank` |
| names in `option(..., arguments=...)` | `rank` |

Other arguments of PEFT and PaddleNLP are accepted only with values that have no effect.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paddlenlp_ext.config.run_config import method_options, options_of
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.utils.suggest import did_you_mean

_WITHOUT_EFFECT = frozenset(
    {
        # information about the training
        *("auto_mapping", "inference_mode", "peft_version", "revision", "runtime_config"),
        # shape, dtype and layout, which are taken from the model
        *("dtype", "head_dim", "hidden_size", "multi_query_group_num", "num_attention_heads", "num_hidden_layers"),
        *("num_layers", "tensor_parallel_degree", "token_dim"),
        # implementation choices, and settings of unsupported features
        *("eps", "megatron_core", "merge_weight", "merge_weights", "qalora_group_size", "use_quick_lora"),
    }
)
_INIT_REMEDY = (
    "use the config class of the initialization (PiSSAConfig, OLoRAConfig, LoftQConfig, LoRAGAConfig), or pass True"
)
_UNAVAILABLE = {
    "task_type": "only causal language models and reward models are supported; use CAUSAL_LM or SEQ_CLS",
    "fan_in_fan_out": "all linear layers store their weight as [out, in]; use False",
    "trainable_modules": "put the modules' names or name suffixes in modules_to_save",
    "init_lora_weights": _INIT_REMEDY,
    "init_weights": _INIT_REMEDY,
    "init_ia3_weights": "the vectors of IA3 start at ones; use True",
    "loftq_config": "use LoftQConfig(iters=..., svd=...)",
    "layers_to_transform": "name the layers in target_modules, such as 'layers.3.self_attn.q_proj'",
    "layers_pattern": "name the layers in target_modules, such as 'layers.3.self_attn.q_proj'",
    "mask_type": "the positions of SHiRA are random; use 'random'",
    "use_cayley_neumann": "set num_cayley_neumann_terms instead (5 in Hugging Face PEFT)",
    "num_transformer_submodules": "a decoder has one submodule; use 1",
    **dict.fromkeys(
        (
            *("alora_invocation_tokens", "arrow_config", "coft", "corda_config", "do_qat", "enable_lokr_list"),
            *("enable_lora_list", "enable_vera_list", "eva_config", "layer_replication"),
            *("lora_bias", "rank_pattern", "megatron_config", "module_dropout", "pissa_init", "qlora_weight_blocksize"),
            *("rank_dropout", "rank_dropout_scale", "rslora", "target_parameters", "tokenizer_kwargs"),
            *("trainable_token_indices", "use_dora", "use_effective_conv2d", "use_qalora", "use_rslora"),
        ),
        "this method does not support the argument; leave it out",
    ),
}
_OFF = (None, False, 0, "", "none", [], {}, ())
_ALSO_OFF: dict[str, tuple[Any, ...]] = {
    "task_type": ("CAUSAL_LM", "SEQ_CLS"),
    "init_lora_weights": (True,),
    "init_weights": (True,),
    "init_ia3_weights": (True,),
    "num_transformer_submodules": (1,),
    "mask_type": ("random",),
}


class TaskType(str, enum.Enum):
    """Task types of Hugging Face PEFT; only CAUSAL_LM and SEQ_CLS are supported."""

    CAUSAL_LM = "CAUSAL_LM"
    FEATURE_EXTRACTION = "FEATURE_EXTRACTION"
    QUESTION_ANS = "QUESTION_ANS"
    SEQ_2_SEQ_LM = "SEQ_2_SEQ_LM"
    SEQ_CLS = "SEQ_CLS"
    TOKEN_CLS = "TOKEN_CLS"


class PromptTuningInit(str, enum.Enum):
    """Initializations of prompt tuning, with the names in Hugging Face PEFT."""

    RANDOM = "RANDOM"
    SAMPLE_VOCAB = "SAMPLE_VOCAB"
    TEXT = "TEXT"


class ConfigType(type):
    """Metaclass of the adapter configs: the constructor accepts all names of each option, and selects a variant.

    `LoRAConfig(use_dora=True)` returns a `DoRAConfig`. `LoRAConfig(init_lora_weights="pissa")` returns a `PiSSAConfig`.
    """

    if not TYPE_CHECKING:  # type checkers and editors read the arguments from the fields

        def __call__(cls, **arguments):
            """Return a config of this method, or of the variant that the arguments select."""
            cls, arguments = _translate(cls, arguments)
            return type.__call__(cls, **arguments)

        @property
        def __signature__(cls):
            """Signature of `__init__`; without this property, `inspect` would show the signature of `__call__`."""
            own = inspect.signature(cls.__init__)
            return own.replace(parameters=list(own.parameters.values())[1:], return_annotation=cls)


def _translate(method: type, arguments: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """Return the config class that the arguments select, and the arguments keyed by the class's field names."""
    method, arguments = _variant(method, arguments)
    names = argument_names(method)
    values: dict[str, Any] = {}
    passed: dict[str, str] = {}
    for name, value in arguments.items():
        field = names.get(name)
        if field is None:
            _check_foreign(method, name, value, names)
            continue
        if field in values:
            raise ValueError(f"{method.__name__}: {passed[field]} and {name} are the same option; pass only one")
        values[field], passed[field] = value, name
    return method, values


@functools.cache
def argument_names(method: type) -> Mapping[str, str]:
    """Return a dict from each accepted argument name to the name of its field."""
    switch = _switch_of(method)
    options = options_of(method, "") if switch is None else method_options(switch, method)
    names = {field.name: field.name for field in dataclasses.fields(method)} | {"trainable_bias": "bias"}
    for option in options:
        for name in (*option.spellings, *option.arguments):
            assert names.get(name, option.attribute) == option.attribute, f"{method.__name__}: two fields named {name}"
            names[name] = option.attribute
    return names


def field_of(method: type, name: str) -> str | None:
    """Return the field that has the alias `name`; None if `name` is a field or unknown."""
    if name.startswith("_") or name in getattr(method, "__dataclass_fields__", {}):
        return None
    field = argument_names(method).get(name)
    return None if field == name else field


def _variant(method: type, arguments: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """Return the variant that the arguments select, and the remaining arguments.

    A variant is selected by its JSON key, such as `pissa=True`, or by an argument of PEFT, such as
    `init_lora_weights="pissa"`.
    """
    family = method.refines or _switch_of(method)
    variants = {switch: variant for switch, variant in PEFT_METHODS.items() if family and variant.refines == family}
    asked = {variant for switch, variant in variants.items() if arguments.get(switch)}
    asked |= {variant for variant in variants.values() if variant.claims(arguments)}
    if not method.refines:
        asked.discard(method)
    elif asked:
        asked.add(method)
    if len(asked) > 1:
        several = " and ".join(sorted(variant.__name__ for variant in asked))
        raise ValueError(
            f"{method.__name__}: the arguments select {several}, but an adapter has one method; choose one"
        )
    chosen = asked.pop() if asked else method
    init = {name: value for name, value in arguments.items() if name == "init_lora_weights"}
    claimed = set(init) if chosen.claims(init) else set()
    return chosen, {name: value for name, value in arguments.items() if name not in {*variants, *claimed}}


def _switch_of(method: type) -> str | None:
    return next((switch for switch, known in PEFT_METHODS.items() if known is method), None)


def _check_foreign(method: type, name: str, value: Any, names: Mapping[str, str]) -> None:
    """Check that an argument without a field is an argument of PEFT or PaddleNLP, with a value that has no effect."""
    if name in _WITHOUT_EFFECT:
        return
    reasons = {**_UNAVAILABLE, **method.unavailable_keys}
    if name not in reasons:
        raise TypeError(f"{method.__name__} has no argument {name!r}{did_you_mean(name, names)}")
    if value not in (*_OFF, *_ALSO_OFF.get(name, ())):
        raise ValueError(f"{method.__name__}: {name}={value!r} is not available: {reasons[name]}")
