"""Checks that a stored adapter is the one that a run's options describe."""

from __future__ import annotations

import dataclasses

from paddlenlp_ext.config.run_config import method_options
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS


def require_same_method(where: str, stored: PeftConfig, wanted: PeftConfig) -> None:
    """Check that both are of one method.

    Raises:
        ValueError: they are not.
    """
    if type(stored) is not type(wanted):
        theirs, ours = (f"{each.peft_type} ({type(each).__name__})" for each in (stored, wanted))
        raise ValueError(
            f"{where} holds an adapter of type {theirs}, and the run's is of type {ours}: start from an adapter of the "
            "run's method, or change the method"
        )


def require_same_function(where: str, stored: PeftConfig, wanted: PeftConfig) -> None:
    """Check that the same tensors do the same under both configs.

    Raises:
        ValueError: they are of different methods, or differ in options; each is named with both values.
    """
    require_same_method(where, stored, wanted)
    differences = [
        f"{_key(field.name, wanted)} was {getattr(stored, field.name)!r} and is {getattr(wanted, field.name)!r} now"
        for field in dataclasses.fields(wanted)
        if field.compare
        and field.name not in wanted.free_on_resume
        and getattr(stored, field.name) != getattr(wanted, field.name)
    ]
    if differences:
        raise ValueError(
            f"{where}: {'; '.join(differences)}: the stored tensors would make another model. Set what was, or begin a "
            "new run that starts from this adapter."
        )


def _key(attribute: str, config: PeftConfig) -> str:
    """The key that a run's file has for a field; one that no file can set has its own name."""
    for switch, method in PEFT_METHODS.items():
        if method is type(config):
            return next((o.key for o in method_options(switch, method) if o.attribute == attribute), attribute)
    return attribute
