"""Reject symlinks that point outside a model or adapter folder, because a merge would copy their targets."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

_TEMPLATES = "additional_chat_templates"
_READ_OR_COPIED = (
    *("*.json", "*.safetensors", "*.npy", "*.bin", "*.pdparams"),
    *("*.model", "*.jinja", "tokenizer*", "vocab*", "chat_template*", "merges.txt"),
    _TEMPLATES,
)


def check_links(folder: Path) -> None:
    """Check that the files of a model or adapter are not symlinks to files outside the folder.

    Symlinks to a blob of the Hugging Face cache (`models--OWNER--NAME/blobs/SUM`) are allowed, because the cache stores
    a model as symlinks in `models--OWNER--NAME/snapshots/REVISION`.

    Raises:
        ValueError: a file is a symlink to a file outside the folder.
    """
    for path in (*folder.glob("*"), *folder.glob(f"{_TEMPLATES}/*")):
        is_used = (
            path.parent != folder or path.name == _TEMPLATES or any(fnmatch(path.name, p) for p in _READ_OR_COPIED)
        )
        if not is_used or not path.is_symlink():
            continue
        target = path.resolve()
        is_blob = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
        if not is_blob and not target.is_relative_to(folder.resolve()):
            raise ValueError(
                f"{path}: a symlink to a file outside its folder, {target}; replace the symlink with the file"
            )
