"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a sibling folder to fill; it takes `target`'s name when the block ends well.

    What stood at `target` is replaced. After an exception the sibling is removed and `target` is as it was; after a
    kill the sibling (`.NAME.incomplete`) may stay behind, and the next attempt clears it.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.incomplete"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        if target.exists():
            old = target.parent / f".{target.name}.replaced"
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            draft.rename(target)
            shutil.rmtree(old)
        else:
            draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def write_text(target: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file in one step: readers see the old content or the new, never a part."""
    target = Path(target)
    draft = target.with_name(f".{target.name}.incomplete")
    draft.write_text(text, encoding="utf-8")
    draft.replace(target)
