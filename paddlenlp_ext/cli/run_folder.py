"""Find the weights and base model of a training run in its output_dir. Paddle is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.builtin_models import BUILTIN_MODELS
from paddlenlp_ext.trainer.checkpoints.output_dir import STATE_FILE, list_checkpoints
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.suggest import did_you_mean

CHECKPOINTS = Path("checkpoints")
"""Folder in which `newest_run` looks for runs."""
_CONFIG, _ADAPTER, _SETTINGS = "config.json", "adapter_config.json", "run_config.json"
_REWARD_TASK = "SEQ_CLS"


@dataclass(frozen=True)
class RunFolder:
    """Model or adapter that a run has written.

    Attributes:
        path: the run's output_dir, or a folder with a model.
        weights: folder with the model or adapter: `path`, or its newest checkpoint if the run has not ended.
        adapter: type of the adapter, such as "LORA"; None if the run trained all weights.
        base: name of the adapter's base model; None without an adapter, or if no file names it.
        is_reward_model: True if the model scores answers, and cannot chat.
        settings: contents of run_config.json; empty without the file.
    """

    path: Path
    weights: Path
    adapter: str | None = None
    base: str | None = None
    is_reward_model: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def find_run(folder: str) -> RunFolder:
    """Return the model or adapter in a folder, or in its newest checkpoint.

    The folder of a model or adapter that no run has written is also accepted.

    Raises:
        ValueError: the folder does not exist, or has neither a model nor an adapter nor a checkpoint.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        siblings = [str(each) for each in path.parent.glob("*") if each.is_dir()] if path.parent.is_dir() else []
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise ValueError(f"{folder} {what}{did_you_mean(str(path), siblings)} Pass the output_dir of a training run")
    weights = _folder_of_weights(path)
    if weights is None:
        inside = [str(each.parent) for each in sorted(path.glob(f"*/{_SETTINGS}"))]
        hint = f"; it contains the runs {', '.join(inside)}" if inside else ""
        raise ValueError(
            f"{folder} has no model or adapter ({_CONFIG} or {_ADAPTER}) and no checkpoint{hint}. Pass the output_dir "
            "of a training run, or --model MODEL"
        )
    settings = read_json_object(weights / _SETTINGS) if (weights / _SETTINGS).is_file() else {}
    if not (weights / _ADAPTER).is_file():
        architectures = read_json_object(weights / _CONFIG).get("architectures") or [""]
        is_classifier = str(architectures[0]).endswith("ForSequenceClassification")
        return RunFolder(path, weights, is_reward_model=is_classifier, settings=settings)
    stored = read_json_object(weights / _ADAPTER)
    base = stored.get("base_model_name_or_path") or settings.get("model_name_or_path")
    adapter = str(stored.get("peft_type", "adapter"))
    return RunFolder(path, weights, adapter, base, stored.get("task_type") == _REWARD_TASK, settings)


def is_model_name(word: str) -> bool:
    """Return whether a word names a model rather than a folder: a built-in name, a .gguf file or a hub id.

    A word whose path or parent folder exists, or that begins with `checkpoints`, is a folder.
    """
    path = Path(word).expanduser()
    if word in BUILTIN_MODELS or path.suffix == ".gguf":
        return True
    if path.exists() or path.parent.is_dir() or path.parts[0] == CHECKPOINTS.name:
        return False
    return word.count("/") == 1 and "\\" not in word


def newest_run() -> RunFolder:
    """Return the only run in the folder `checkpoints`.

    Raises:
        ValueError: there is no run, or there are several; the message lists them, the newest first.
    """
    states = [path for depth in ("*", "*/*") for path in CHECKPOINTS.glob(f"{depth}/{STATE_FILE}")]
    states = [path for path in states if not path.parent.name.startswith("checkpoint-")]
    runs = [path.parent for path in sorted(states, key=lambda path: path.stat().st_mtime, reverse=True)]
    runs = [path for path in runs if _folder_of_weights(path) is not None]
    if len(runs) == 1:
        return find_run(str(runs[0]))
    if not runs:
        raise ValueError(f"no run in ./{CHECKPOINTS}; pass the output_dir of a training run, or --model MODEL")
    raise ValueError(f"./{CHECKPOINTS} has several runs; pass one of them: {', '.join(map(str, runs))}")


def _folder_of_weights(path: Path) -> Path | None:
    """Return `path` if it has a model or adapter, else its newest checkpoint with a model or adapter, else None."""
    folders = [path, *reversed(list_checkpoints(path).values())]
    return next((each for each in folders if (each / _ADAPTER).is_file() or (each / _CONFIG).is_file()), None)
