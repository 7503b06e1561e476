"""Several named adapters over one base model, one of them on at a time; of any methods, nothing is copied to switch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle import nn

from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer, attach_adapters, detach_adapters
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.utils.registry import did_you_mean


class MultiAdapterModel:
    """Keeps adapters by name. All share the base's weights; switching puts other layers around them.

        adapters = AdapterSet(model)
        adapters.load("poems", "folder-a")
        adapters.load("code", "folder-b")
        adapters.set_adapter("poems").generate(...)
        with adapters.disabled(): ...

    Args:
        model: the base, without an adapter.
    """

    def __init__(self, model: nn.Layer) -> None:
        self.base_model = model
        self.active: str | None = None
        """The adapter that is on; None: the base alone."""
        self._adapters: dict[str, tuple[PeftModel, dict[str, AdapterLayer]]] = {}

    @property
    def model(self) -> Any:
        """The model as it stands: the active adapter's `PeftModel`, or the base."""
        return self.base_model if self.active is None else self._adapters[self.active][0]

    def names(self) -> list[str]:
        """All adapters, in the order in which they came."""
        return list(self._adapters)

    def load(self, name: str, folder: str | os.PathLike[str]) -> PeftModel:
        """Read an adapter and switch to it, in evaluation mode.

        Raises:
            ValueError: the name is taken, or as `PeftModel.from_pretrained`; what was on stays on then.
        """
        return self._enter(name, lambda: PeftModel.from_pretrained(self.base_model, folder))

    def add(self, name: str, config: PeftConfig, seed: int = 42) -> PeftModel:
        """Make a new adapter, to be trained, and switch to it.

        Raises:
            ValueError: the name is taken, or as `get_peft_model`; what was on stays on then.
        """
        return self._enter(name, lambda: get_peft_model(self.base_model, config, seed))

    def set_adapter(self, name: str | None) -> Any:
        """Switch to an adapter, None: to the base alone. Returns the model as it stands then.

        Raises:
            ValueError: there is no such adapter.
        """
        if name is not None and name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise ValueError(f"no adapter {name!r}{did_you_mean(name, self._adapters)} Known: {known}.")
        detach_adapters(self.base_model)
        self.active = name
        if name is not None:
            attach_adapters(self.base_model, self._adapters[name][1])
        return self.model

    @contextmanager
    def disabled(self) -> Iterator[Any]:
        """Within the block the model is its base, which is given; afterwards it is what it was."""
        active = self.active
        try:
            yield self.set_adapter(None)
        finally:
            self.set_adapter(active)

    def delete(self, name: str) -> None:
        """Forget an adapter; if it was on, the base alone is on then.

        Raises:
            ValueError: there is no such adapter.
        """
        self.set_adapter(None if self.active == name else self.active)
        if self._adapters.pop(name, None) is None:
            raise ValueError(f"no adapter {name!r}{did_you_mean(name, self._adapters)}")

    def _enter(self, name: str, make: Any) -> PeftModel:
        if name in self._adapters:
            raise ValueError(f"there is an adapter {name!r} already: delete it, or choose another name.")
        active = self.active
        self.set_adapter(None)
        try:
            adapted = make()
            self._adapters[name] = (adapted, detach_adapters(self.base_model))
        except BaseException:
            self.set_adapter(active)
            raise
        return self.set_adapter(name)
