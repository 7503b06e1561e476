"""What a run keeps in its output_dir: whose files are there, which checkpoints, which of them may go."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paddlenlp_ext.utils.logging import get_logger

STATE_FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_RUN_FILES = (
    STATE_FILE,
    "run_config.json",
    "metrics.jsonl",
    "train_results.json",
    "eval_results.json",
    "all_results.json",
    "generated_output.json",
    "loss.png",
    "adapter_config.json",
    "adapter_model.safetensors",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
)
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
_LEFTOVERS = (".checkpoint-*.incomplete", ".checkpoint-*.replaced", ".checkpoint-*.removed")


def checkpoint_folder(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of that step stands or will stand."""
    return Path(output_dir) / f"checkpoint-{step}"


def list_checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """Complete checkpoints by step, in rising order. One without its trainer_state.json is no checkpoint of a run."""
    found = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match and (path / STATE_FILE).is_file():
            found[int(match[1])] = path
        elif match:
            get_logger(__name__).warning("%s has no %s: it is not taken for a checkpoint", path, STATE_FILE)
    return dict(sorted(found.items()))


def find_checkpoint(output_dir: str | Path, resume: bool | str | None) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` means: None or False none, True the newest, or a folder.

    Raises:
        ValueError: there is no such checkpoint, or `output_dir` holds newer ones than the one named.
    """
    if resume is None or resume is False:
        return None
    checkpoints = list_checkpoints(output_dir)
    if resume is True:
        if not checkpoints:
            raise ValueError(
                f"resume_from_checkpoint is true, but {output_dir} holds no complete checkpoint: leave it out to start"
            )
        return list(checkpoints.values())[-1]
    folder = Path(resume)
    if not (folder / STATE_FILE).is_file():
        raise ValueError(f"resume_from_checkpoint {resume!r} is no checkpoint: it has no {STATE_FILE}")
    steps = [step for step, path in checkpoints.items() if path.resolve() == folder.resolve()]
    newer = [path.name for step, path in checkpoints.items() if steps and step > steps[0]]
    if newer:
        raise ValueError(
            f"{output_dir} also holds {', '.join(newer)}, from beyond {folder.name}: remove them first, or use another "
            "output_dir; a later resume would mistake them for this run's"
        )
    return folder


def check_output_dir(config: Any) -> None:
    """Refuse to mix two runs in one folder. Nothing is changed; call it before any weight is read.

    Args:
        config: the run's `RunConfig`.

    Raises:
        ValueError: there is no `output_dir`, it can't be written to, it is the model's own folder, it holds a run that
            is neither to be resumed nor overwritten, or weights of none, or overwriting would remove what the run
            starts from.
    """
    train = config.train
    if train.output_dir is None:
        raise ValueError("output_dir is not set: name a folder for the run")
    output_dir, model_path = Path(train.output_dir), config.model.model_name_or_path
    _check_writable(output_dir)
    if model_path is not None and output_dir.resolve() == Path(model_path).expanduser().resolve():
        raise ValueError(f"output_dir {output_dir} is the folder of the model itself: use another one")
    checkpoint = find_checkpoint(output_dir, train.resume_from_checkpoint)
    if is_inside(checkpoint, output_dir):
        return
    if train.overwrite_output_dir:
        _check_start_stays(output_dir, {"model_name_or_path": model_path, "the adapter's path": _adapter_path(config)})
        return
    if list_checkpoints(output_dir) or (output_dir / STATE_FILE).is_file():
        raise ValueError(
            f"output_dir {output_dir} already holds a run. To go on with it: resume_from_checkpoint: true. To start "
            "anew: overwrite_output_dir: true (removes that run's files), or another output_dir"
        )
    weights = next((output_dir / name for name in _WEIGHT_FILES if (output_dir / name).is_file()), None)
    if train.do_train and weights is not None:
        raise ValueError(
            f"output_dir {output_dir} holds a model or adapter, {weights.name}, that this run would replace or lie "
            "beside: use another output_dir, or overwrite_output_dir: true to remove it"
        )


def _check_writable(output_dir: Path) -> None:
    """Refuse what can become no folder of files before the time that reading a model takes is spent."""
    place = next(path for path in (output_dir, *output_dir.absolute().parents) if os.path.lexists(path))
    if not place.is_dir():
        raise ValueError(f"output_dir {output_dir}: {place} is no folder; use another one")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir {output_dir}: {place} can't be written to; use another one")


def _adapter_path(config: Any) -> str | None:
    return None if config.peft is None else config.peft.path


def _check_start_stays(output_dir: Path, starts: Mapping[str, str | None]) -> None:
    """Refuse to remove, with an earlier run, the model or adapter that the new one starts from."""
    going = [output_dir.resolve(), *(path.resolve() for path in _checkpoint_folders(output_dir))]
    for what, path in starts.items():
        if path is not None and Path(path).expanduser().resolve() in going:
            raise ValueError(
                f"{what} is {path}, which overwrite_output_dir: true would remove from output_dir {output_dir}: use "
                "another output_dir, or move what the run starts from"
            )


def is_inside(checkpoint: Path | None, output_dir: Path) -> bool:
    """Whether resuming from `checkpoint` goes on with the run of `output_dir`; one from elsewhere begins a new run."""
    return checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve()


def clear_run(output_dir: str | Path) -> None:
    """Remove an earlier run's checkpoints, weights, logs and results; whatever else is there stays."""
    folder = Path(output_dir)
    for pattern in _RUN_FILES:
        for path in folder.glob(pattern):
            path.unlink()
    for path in _checkpoint_folders(folder):
        _remove(path)
    clear_leftovers(folder)


def _checkpoint_folders(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name, whole or not."""
    return [path for path in folder.glob("checkpoint-*") if path.is_dir() and _CHECKPOINT.fullmatch(path.name)]


def clear_leftovers(output_dir: str | Path) -> None:
    """Remove the hidden folders of checkpoints whose writing or removal was cut short."""
    for pattern in _LEFTOVERS:
        for path in Path(output_dir).glob(pattern):
            shutil.rmtree(path)


def prune_checkpoints(output_dir: str | Path, limit: int | None, keep: Collection[int | None]) -> None:
    """Keep the newest `limit` checkpoints (None: all) and those of the steps in `keep`."""
    if limit is None:
        return
    checkpoints = list_checkpoints(output_dir)
    newest = list(checkpoints)[-limit:]
    for step, path in checkpoints.items():
        if step not in newest and step not in keep:
            _remove(path)


def _remove(path: Path) -> None:
    """Take a folder's name away first: a removal cut short must not leave what looks like a checkpoint."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)
