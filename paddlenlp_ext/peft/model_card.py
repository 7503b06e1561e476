"""The README.md of a merged model: from what it was made, and what was measured."""

from __future__ import annotations

import os
from pathlib import Path

from paddlenlp_ext.peft.files import AdapterFiles
from paddlenlp_ext.utils.files import write_text


def write_model_card(
    folder: Path, stored: AdapterFiles, base: str | os.PathLike[str], merged_into: str, effect: float, difference: float
) -> None:
    """Write README.md.

    Args:
        folder: of the merged model.
        stored: the adapter.
        base: the base model, as the user called it.
        merged_into: the weights that the adapter was added to, in words.
        effect: how far the adapter moves a logit at most.
        difference: how far the merged model is from the trained one at most, in a logit.
    """
    text = f"""---
base_model: {os.fspath(base)}
tags:
- merged
---
# {os.fspath(base)} with an adapter merged into it

- adapter: {stored.folder.name}, of type {stored.config.peft_type}
- merged into: {merged_into}
- measured on fixed prompts: the adapter moves a logit by up to {effect:.3g}; this model differs from the one that was
  trained by up to {difference:.3g}
"""
    write_text(folder / "README.md", text)
