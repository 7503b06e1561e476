"""Several named adapters over one base model, one of them on; of any methods, nothing is copied to switch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.layers import AdapterLayer, attach_adapters, detach_adapters
from paddlenlp_ext.utils.registry import did_you_mean


class AdaptedModel(Protocol):
    """Interface of `PeftModel` that this module uses."""

    base_model: TrainableModel
    adapters: Any


@dataclass(frozen=True)
class _Resting:
    """An adapter that is off: class and state of its `PeftModel`, and its layers by name."""

    model_class: type
    state: dict[str, Any]
    layers: dict[str, AdapterLayer]


class MultiAdapterModel:
    """Adapters of one `PeftModel` by name; each has a state and a class of its own, which the model takes over.

    Attributes:
        active: name of the adapter that is on.
    """

    def __init__(self, active: str) -> None:
        self.active = active
        self._resting: dict[str, _Resting] = {}

    def names(self) -> list[str]:
        """All adapters, the active one first."""
        return [self.active, *self._resting]

    def add(self, model: AdaptedModel, name: str, make: Callable[[], AdaptedModel]) -> None:
        """Keep another adapter of the model's base; the active one stays on.

        Args:
            model: the model of the active adapter.
            name: of the new adapter.
            make: puts the new adapter on the bare base and returns its model.

        Raises:
            ValueError: the name is taken, or as `make`; nothing has changed then.
        """
        if name in self.names():
            raise ValueError(f"adapter {name!r} exists; delete it or choose another name")
        layers = detach_adapters(model.base_model)
        try:
            other = make()
            other.adapters = self
            self._resting[name] = _Resting(type(other), other.__dict__, detach_adapters(model.base_model))
        finally:
            attach_adapters(model.base_model, layers)

    def switch(self, model: AdaptedModel, name: str) -> None:
        """Let the model be that of another adapter.

        Raises:
            ValueError: there is no such adapter.
        """
        self._require(name)
        if name == self.active:
            return
        self._resting[self.active] = _Resting(type(model), model.__dict__, detach_adapters(model.base_model))
        other = self._resting.pop(name)
        attach_adapters(model.base_model, other.layers)
        object.__setattr__(model, "__class__", other.model_class)
        object.__setattr__(model, "__dict__", other.state)
        self.active = name

    def delete(self, name: str) -> None:
        """Forget an adapter that is off.

        Raises:
            ValueError: there is no such adapter, or it is on.
        """
        self._require(name)
        if name == self.active:
            raise ValueError(f"adapter {name!r} is on; set another one before deleting it")
        del self._resting[name]

    def _require(self, name: str) -> None:
        if name not in self.names():
            raise ValueError(f"no adapter {name!r}{did_you_mean(name, self.names())} Known: {', '.join(self.names())}")
