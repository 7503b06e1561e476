"""Several named adapters, of any methods, over one base model; one is active, and switching copies no tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.modules_to_save import DetachedAdapter, attach_adapter, detach_adapter
from paddlenlp_ext.utils.suggest import did_you_mean


class AdaptedModel(Protocol):
    """Interface of `PeftModel` that this module uses."""

    base_model: TrainableModel
    adapters: Any


@dataclass(frozen=True)
class _InactiveAdapter:
    """Adapter that is not active: class and state of its `PeftModel`, and its layers and parameters."""

    model_class: type
    state: dict[str, Any]
    adapter: DetachedAdapter


class MultiAdapterModel:
    """Named adapters of one `PeftModel`.

    Each adapter has its own subclass and state of `PeftModel`; the model takes over those of the active adapter.

    Attributes:
        active: name of the active adapter.
    """

    def __init__(self, active: str) -> None:
        self.active = active
        self._inactive: dict[str, _InactiveAdapter] = {}

    def names(self) -> list[str]:
        """Return the names of all adapters, the active one first."""
        return [self.active, *self._inactive]

    def add(self, model: AdaptedModel, name: str, make: Callable[[], AdaptedModel]) -> None:
        """Add another adapter to the model's base; the active adapter stays active.

        Args:
            model: model of the active adapter.
            name: name of the new adapter.
            make: adds the new adapter to the base, which has no adapter then, and returns its model.

        Raises:
            ValueError: the name is taken, or `make` raises; nothing has changed.
        """
        if name in self.names():
            raise ValueError(f"adapter {name!r} already exists; delete it or choose another name")
        adapter = detach_adapter(model.base_model)
        try:
            other = make()
            other.adapters = self
            self._inactive[name] = _InactiveAdapter(type(other), other.__dict__, detach_adapter(model.base_model))
        finally:
            attach_adapter(model.base_model, adapter)

    def switch(self, model: AdaptedModel, name: str) -> None:
        """Make another adapter active.

        Raises:
            ValueError: no adapter has this name.
        """
        self._require(name)
        if name == self.active:
            return
        self._inactive[self.active] = _InactiveAdapter(type(model), model.__dict__, detach_adapter(model.base_model))
        other = self._inactive.pop(name)
        attach_adapter(model.base_model, other.adapter)
        object.__setattr__(model, "__class__", other.model_class)
        object.__setattr__(model, "__dict__", other.state)
        self.active = name

    def delete(self, name: str) -> None:
        """Delete an adapter that is not active.

        Raises:
            ValueError: no adapter has this name, or it is active.
        """
        self._require(name)
        if name == self.active:
            raise ValueError(f"adapter {name!r} is active; set another one before deleting it")
        del self._inactive[name]

    def _require(self, name: str) -> None:
        if name not in self.names():
            raise ValueError(f"no adapter {name!r}{did_you_mean(name, self.names())} Known: {', '.join(self.names())}")
