"""Named adapters of one base model, with one active adapter: add, switch, delete, and merge in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.merge.in_memory import MergedAdapter
from paddlenlp_ext.utils.suggest import did_you_mean


@dataclass(eq=False)
class NamedAdapters:
    """Named adapters of one base model, possibly with different methods; switching adapters does not copy tensors.

    Attributes:
        active_name: name of the active adapter, whose layers are in the base model.
    """

    active_name: str
    _adapters: dict[str, Adapter]
    _merged: MergedAdapter | None = field(init=False, default=None)

    def __getitem__(self, name: str) -> Adapter:
        if name not in self._adapters:
            known = self.names()
            raise ValueError(f"no adapter {name!r}{did_you_mean(name, known)} Known: {', '.join(known)}")
        return self._adapters[name]

    @property
    def active(self) -> Adapter:
        """The active adapter, whose layers are in the base model."""
        return self._adapters[self.active_name]

    def names(self) -> list[str]:
        """Return the names of all adapters."""
        return list(self._adapters)

    def add(self, name: str, create: Callable[[], Adapter]) -> None:
        """Add an adapter; the active adapter stays active.

        Args:
            name: name of the new adapter.
            create: function that adds the new adapter to the base model while the active adapter is detached.

        Raises:
            ValueError: the name is taken, the active adapter is merged, or `create` raises; the model is unchanged.
        """
        self.require_unmerged("adding an adapter")
        if name in self._adapters:
            raise ValueError(f"adapter {name!r} already exists; delete it or choose another name")
        self.active.detach()
        try:
            adapter = create()
            adapter.detach()
            self._adapters[name] = adapter
        finally:
            self.active.attach()

    def switch(self, name: str) -> None:
        """Activate another adapter.

        Raises:
            ValueError: no adapter has this name, or the active adapter is merged.
        """
        self.require_unmerged("set_adapter")
        other = self[name]
        if other is not self.active:
            self.active.detach()
            other.attach()
            self.active_name = name

    def delete(self, name: str) -> None:
        """Delete an adapter that is not active.

        Raises:
            ValueError: no adapter has this name, or it is active.
        """
        if self[name] is self.active:
            raise ValueError(f"adapter {name!r} is active; activate another adapter (set_adapter) before deleting it")
        del self._adapters[name]

    # -- merging in place ---------------------------------------------------------------------------------------------
    def merge(self, names: Sequence[str] | None, safe_merge: bool) -> None:
        """Merge the active adapter in place; arguments as in `PeftModel.merge_adapter`."""
        self.require_unmerged("merge_adapter")
        if names is not None and list(names) != [self.active_name]:
            raise ValueError(
                f"adapter_names={list(names)}: only the active adapter {self.active_name!r} can be merged in place; "
                "activate another adapter with set_adapter(), or combine several adapters with add_weighted_adapter()"
            )
        self._merged = MergedAdapter(self.active, safe_merge)

    def unmerge(self) -> None:
        """Undo `merge` exactly; do nothing if no adapter is merged."""
        if self._merged is not None:
            self._merged.undo()
            self._merged = None

    @property
    def is_merged(self) -> bool:
        """True if the active adapter is merged."""
        return self._merged is not None

    @contextmanager
    def unmerged(self) -> Iterator[Adapter]:
        """Context manager: yield the active adapter, which is unmerged within the block."""
        with nullcontext() if self._merged is None else self._merged.undone():
            yield self.active

    def require_unmerged(self, action: str) -> None:
        """Check that the active adapter is not merged.

        Raises:
            ValueError: the active adapter is merged; the message starts with `action`.
        """
        if self._merged is not None:
            raise ValueError(f"{action}: adapter {self.active_name!r} is merged; call unmerge_adapter() first")
