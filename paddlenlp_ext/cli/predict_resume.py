"""Resume an interrupted prediction.

Answers for the output file `NAME` are written to `.NAME.incomplete`, and the inputs of the run to `.NAME.inputs`, both
in the folder of `NAME`. A later run with equal inputs continues after the last complete line. A later run with other
inputs raises an error, because the file would mix the answers of two runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.utils.files import read_json_object, write_json
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.predict")


class IncompleteFile:
    """Output file that is being written.

    Attributes:
        path: the file with the lines written so far.

    Args:
        output_file: final name of the file.
        inputs: JSON values that the answers depend on, by name; error messages show the names.
    """

    def __init__(self, output_file: str | os.PathLike[str], inputs: Mapping[str, Any]) -> None:
        self._output = Path(output_file).expanduser()
        self._inputs = dict(inputs)
        self.path = self._output.with_name(f".{self._output.name}.incomplete")
        self._inputs_file = self._output.with_name(f".{self._output.name}.inputs")

    def check(self) -> None:
        """Check that lines of an earlier run were written with the same inputs.

        Raises:
            ValueError: the file has lines of an earlier run with other inputs.
        """
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        stored = read_json_object(self._inputs_file) if self._inputs_file.is_file() else {}
        names = [name for name in {**self._inputs, **stored} if stored.get(name) != self._inputs.get(name)]
        if names:
            raise ValueError(
                f"{self.path} has answers of an interrupted run with other inputs ({', '.join(names)}); repeat the run "
                "with the same inputs to continue it, or delete the file"
            )

    def begin(self) -> int:
        """Prepare the file for more lines; return the number of complete lines in the file.

        Raises:
            ValueError: see `check`.
        """
        self.check()
        complete = [line for line in _lines(self.path) if line.endswith(b"\n")]
        if complete:
            logger.info("continuing an interrupted run: %s has %d answers", self.path, len(complete))
        else:
            write_json(self._inputs_file, self._inputs)
        with self.path.open("ab") as draft:
            draft.truncate(sum(map(len, complete)))
        return len(complete)

    def complete(self) -> None:
        self.path.replace(self._output)
        self._inputs_file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the lines, after the output file was made from them."""
        self.path.unlink(missing_ok=True)
        self._inputs_file.unlink(missing_ok=True)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def files_state(path: Path) -> list[Any]:
    """Return the name, size and modification time of a file, or of each file in a folder, sorted by name."""
    files: Sequence[Path] = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [(file.name, file.stat()) for file in files if file.is_file()]
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]
