"""Write adapter folders in the layout of Hugging Face PEFT."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.adapter_config import CONFIG_FILE
from paddlenlp_ext.peft.formats.read_adapter import WEIGHTS_FILE
from paddlenlp_ext.utils.files import write_text


def write_adapter(
    folder: str | os.PathLike[str],
    fields: Mapping[str, Any],
    tensors: Mapping[str, Any],
    keys: Mapping[str, str] = MappingProxyType({}),
    prefix: str = PeftConfig.key_prefix,
) -> None:
    """Write an adapter in Hugging Face PEFT's layout; each file is written atomically, the config last.

    Args:
        folder: created if it does not exist.
        fields: content of adapter_config.json.
        tensors: the stored tensors, by this package's names.
        keys: keys of tensors that are not their names with the prefix.
        prefix: `PeftConfig.key_prefix` of the method.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = {keys.get(name, f"{prefix}{name}"): tensor for name, tensor in tensors.items()}
    write_safetensors(folder / WEIGHTS_FILE, named, metadata={"format": "pt"})
    write_text(folder / CONFIG_FILE, json.dumps(dict(sorted(fields.items())), indent=2) + "\n")
