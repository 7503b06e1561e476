r"""Import the user-defined callbacks that the key `callbacks` lists.

class Beep(Callback):                            # my_callbacks.py
    def on_train_end(self, state):
        print("\a")

"callbacks": ["my_callbacks.Beep"]         or    "callbacks": ["~/tools/my_callbacks.py:Beep"]
"""

from __future__ import annotations

from collections.abc import Iterable

from paddlenlp_ext.utils.import_by_path import import_by_path


def load_callbacks(paths: Iterable[str]) -> list[type]:
    """Import callback classes: subclasses of `Callback`, or classes with the hooks of transformers' `TrainerCallback`.

    Args:
        paths: the value of the key `callbacks` (see `import_by_path`).

    Raises:
        ValueError: a module cannot be imported, or does not define the named class.
    """
    classes = []
    for path in paths:
        found = import_by_path(path, "callbacks")
        if not isinstance(found, type):
            raise ValueError(f"callbacks: {path} is not a class; name a subclass of paddlenlp_ext.Callback")
        classes.append(found)
    return classes
