"""Check of the folder to which a command writes a model."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.utils.files import check_writable
from paddlenlp_ext.utils.locks import check_no_active_run


def check_output(output: Path, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    """Check that `output` can be written without replacing an input, an active run, or a model (unless `overwrite`).

    Raises:
        ValueError: the folder cannot be written, or writing would replace an input, an active run, a model, or a folder
            with other files.
    """
    check_no_active_run(output)
    check_writable(output.parent, str(output))
    resolved = output.resolve()
    for path in inputs:
        if resolved == path.resolve() or resolved in path.resolve().parents:
            raise ValueError(f"{output}: writing there would replace the input {path}; choose another folder")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{output} already exists; choose another folder, or pass --overwrite")
    if not (output / "config.json").is_file():
        raise ValueError(f"{output} is not a model folder (no config.json) and is not replaced; choose another folder")
