"""Save and load the state of an interrupted run: tensors as safetensors, other values as JSON, without pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, write_safetensors
from paddlenlp_ext.utils.files import read_json_object, write_text

TENSORS_FILE = "training_state.safetensors"
STATE_FILE = "training_state.json"  # written last: a folder with this file is complete


def save_training_state(folder: str | os.PathLike[str], tensors: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the optimizer tensors and the other state that a resumed run needs.

    Args:
        folder: folder of the checkpoint, created if absent.
        tensors: name -> Paddle tensor, NumPy array or LazyTensor; dtypes are kept.
        state: JSON-serializable values. Floats are restored exactly.

    Raises:
        ValueError: `state` is not JSON-serializable.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        text = json.dumps({"num_tensors": len(tensors), "state": dict(state)}, indent=1)
    except TypeError as error:
        raise ValueError(f"training state for {folder}: {error}; pass arrays in `tensors`") from error
    write_safetensors(folder / TENSORS_FILE, tensors)
    write_text(folder / STATE_FILE, text + "\n")


def load_training_state(folder: str | os.PathLike[str]) -> tuple[SafetensorsFile, dict[str, Any]]:
    """Load the state and open the tensors that `save_training_state` wrote.

    Args:
        folder: folder of the checkpoint.

    Returns:
        The open tensor file and the state. `read(name)` of the tensor file loads one tensor; bfloat16 is returned as
        its bits (dtypes.py).

    Raises:
        ValueError: a file is missing or damaged, or the tensor file does not have as many tensors as were saved; the
            message names the file.
    """
    folder = Path(folder)
    file = folder / STATE_FILE
    content = read_json_object(file)
    tensors = SafetensorsFile(folder / TENSORS_FILE)
    if not isinstance(content.get("state"), dict) or content.get("num_tensors") != len(tensors.names()):
        raise ValueError(
            f"{file}: does not match {tensors.path.name}, which has {len(tensors.names())} tensors; "
            "resume from another checkpoint"
        )
    return tensors, content["state"]
