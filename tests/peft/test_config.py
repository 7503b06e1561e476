"""The interface of adapter methods: its size, and the defaults that fit an adapter of linear layers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter
from paddlenlp_ext.peft.registry import PEFT_METHODS

NO_HOOKS = {"from_pretrained", "name_in_errors", "replace"}


def own_members(owner: type, base: type) -> set[str]:
    """Return the public members that a class adds to its base."""
    inherited = {name for parent in base.__mro__ for name in (*vars(parent), *getattr(parent, "__annotations__", {}))}
    declared = {*vars(owner), *vars(owner).get("__annotations__", {})}
    return {name for name in declared if not name.startswith("_")} - inherited


def test_peft_config_interface_stays_small():
    hooks = own_members(PeftConfig, object) - {field.name for field in fields(PeftConfig)} - NO_HOOKS
    assert len(hooks) <= 33, sorted(hooks)


def test_adapter_layer_interface_stays_small():
    from paddle import nn

    assert len(own_members(AdapterLayer, nn.Layer)) <= 9
    assert len(own_members(LinearAdapter, AdapterLayer)) <= 12


def test_registered_methods_override_only_members_of_the_interface():
    allowed = own_members(PeftConfig, object)
    required = {"targets", "wrap", "to_adapter_config", "from_adapter_config"}
    overridden: dict[str, Any] = {}
    for switch, method in PEFT_METHODS.items():
        overridden[switch] = {
            name for parent in method.__mro__[:-1] if parent is not PeftConfig for name in vars(parent)
        }
        assert required <= overridden[switch], switch
        assert hasattr(method, "peft_type"), switch
    options = {field.name for field in fields(PeftConfig)}
    for hook in allowed - required - options - NO_HOOKS - {"peft_type"}:
        assert any(hook in names for names in overridden.values()), f"no method overrides {hook}"
