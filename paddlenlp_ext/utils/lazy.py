"""Objects that are made when they are first needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Late:
    """Stands for an object that is costly to make: what is known of it is answered at once, anything else makes it.

    Args:
        make: gives the object; called once, by the first question to which the answer is not known.
        known: attributes of the object.
    """

    def __init__(self, make: Callable[[], Any], **known: Any) -> None:
        vars(self).update(known)
        self._made = functools.cache(make)

    def __getattr__(self, name: str) -> Any:
        """Called for what stands nowhere yet."""
        return getattr(self._made(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._made()(*args, **kwargs)
