"""Check output_dir before a run, find and prune checkpoints, and remove the files of an earlier run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.report.run_folder import HISTORY_FILE, PAGE_FILE
from paddlenlp_ext.utils.distributed_env import is_main_rank
from paddlenlp_ext.utils.files import check_writable, restore_replaced, write_json
from paddlenlp_ext.utils.locks import run_lock

STATE_FILE = "trainer_state.json"
AUTO = "auto"
"""Value of `resume_from_checkpoint`: resume from the newest checkpoint; if there is no checkpoint, start a new run."""
BAD_STEPS_FILE = "bad_steps.jsonl"
EVAL_ROWS_FILE = "eval_rows.jsonl"
"""File into which `pnx predict` and `pnx eval` copy the eval rows of a run (cli/eval_rows.py)."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_RUN_FILES = (
    STATE_FILE,
    "run_config.json",
    "metrics.jsonl",
    HISTORY_FILE,
    PAGE_FILE,
    BAD_STEPS_FILE,
    EVAL_ROWS_FILE,
    "train_results.json",
    "eval_results.json",
    "test_results.json",
    "all_results.json",
    "generated_output*.json",
    "label_scores*.json",
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
    """Return the folder of a step's checkpoint."""
    return Path(output_dir) / f"checkpoint-{step}"


def list_checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """Return the folders of the checkpoints with a trainer_state.json, by step in ascending order."""
    return {step: path for step, path in _checkpoint_folders(output_dir).items() if (path / STATE_FILE).is_file()}


def resume_candidates(output_dir: str | Path, resume: bool | str | None) -> list[Path]:
    """Return the checkpoints to resume from, in order of preference; an empty list means a new run.

    If a run was killed while replacing a checkpoint, the old checkpoint is renamed back to its original name.

    Args:
        output_dir: the run's folder.
        resume: `resume_from_checkpoint`. None or False: start a new run; True: resume from the newest checkpoint;
            "auto": like True, but start a new run if there is no checkpoint; a path: resume from this checkpoint.

    Raises:
        ValueError: the checkpoint does not exist, or `output_dir` has newer checkpoints than the path in `resume`.
    """
    if resume is None or resume is False:
        return []
    _restore_replaced(Path(output_dir))
    if resume is True or resume == AUTO:
        newest_first = list(_checkpoint_folders(output_dir).values())[::-1]
        if not newest_first and resume is True:
            raise ValueError(
                f"resume_from_checkpoint is true, but {output_dir} has no checkpoint; remove the key to start a new "
                f'run, or set it to "{AUTO}" to resume only if a checkpoint exists'
            )
        return newest_first
    folder = Path(resume)
    if not (folder / STATE_FILE).is_file():
        raise ValueError(f"resume_from_checkpoint {resume!r} is not a checkpoint: {STATE_FILE} is missing")
    checkpoints = list_checkpoints(output_dir)
    steps = [step for step, path in checkpoints.items() if path.resolve() == folder.resolve()]
    newer = [path.name for step, path in checkpoints.items() if steps and step > steps[0]]
    if newer:
        raise ValueError(
            f"{output_dir} has checkpoints newer than {folder.name}: {', '.join(newer)}; a later resume would continue "
            "from the newest checkpoint; remove the newer checkpoints, or choose another output_dir"
        )
    return [folder]


@contextmanager
def locked_output_dir(config: RunConfig) -> Iterator[None]:
    """Lock `output_dir` in the main process of a run, so that other runs cannot write to it.

    Raises:
        ValueError: another run holds the lock, or `output_dir` is not set, not writable, or the folder of the model.
    """
    if not is_main_rank():
        yield
        return
    with run_lock(_checked_place(config)):
        yield


def check_output_dir(config: RunConfig) -> None:
    """Check that a run may write to its `output_dir`, without removing or overwriting files of an earlier run.

    Raises:
        ValueError: `output_dir` is not set, is not writable, is the folder of the model, or has weights or an earlier
            run that is neither resumed nor overwritten; or overwriting would remove the model or adapter that the run
            starts from.
    """
    output_dir, train, adapter = _checked_place(config), config.train, config.peft
    candidates = resume_candidates(output_dir, train.resume_from_checkpoint)
    if candidates and is_inside(candidates[0], output_dir):
        return
    if train.overwrite_output_dir:
        inputs = {"model_name_or_path": config.model.model_name_or_path, "the adapter's path": adapter and adapter.path}
        _check_inputs_are_preserved(output_dir, inputs)
        return
    # With "auto", a run that ended before its first checkpoint is started again.
    if list_checkpoints(output_dir) or ((output_dir / STATE_FILE).is_file() and train.resume_from_checkpoint != AUTO):
        raise ValueError(
            f"output_dir {output_dir} already has a run; to continue the run, set resume_from_checkpoint: true; to "
            "start over, set overwrite_output_dir: true (removes the files of the earlier run) or choose another path"
        )
    weights = next((output_dir / name for name in _WEIGHT_FILES if (output_dir / name).is_file()), None)
    if train.do_train and weights is not None:
        raise ValueError(
            f"output_dir {output_dir} has a model or adapter, {weights.name}, which this run could overwrite; choose "
            "another path, or set overwrite_output_dir: true to remove the file"
        )


def _checked_place(config: RunConfig) -> Path:
    """Return `output_dir`.

    Raises:
        ValueError: `output_dir` is not set, is not writable, or is the folder of the model.
    """
    if config.train.output_dir is None:
        raise ValueError("output_dir is not set; name a folder for the run")
    output_dir, model_path = Path(config.train.output_dir), config.model.model_name_or_path
    check_writable(output_dir, f"output_dir {output_dir}")
    if model_path is not None and output_dir.resolve() == Path(model_path).expanduser().resolve():
        raise ValueError(f"output_dir {output_dir} is the folder of the model; choose another path")
    return output_dir


def _check_inputs_are_preserved(output_dir: Path, inputs: Mapping[str, str | None]) -> None:
    """Check that the files to remove do not include the model or adapter that the run starts from."""
    removed = [output_dir.resolve(), *(path.resolve() for path in _checkpoint_folders(output_dir).values())]
    for name, path in inputs.items():
        if path is not None and Path(path).expanduser().resolve() in removed:
            raise ValueError(
                f"{name} is {path}, which overwrite_output_dir: true would remove from output_dir {output_dir}; "
                f"choose another output_dir, or move {path}"
            )


def is_inside(checkpoint: Path | None, output_dir: Path) -> bool:
    """Return whether `checkpoint` is a folder in `output_dir`, so that it belongs to the same run."""
    return checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve()


def begin_output_dir(
    output_dir: Path, checkpoint: Path | None, overwrites: bool, run_config: Mapping[str, object]
) -> None:
    """Create output_dir and write run_config.json; with `overwrites`, first remove an earlier run that is not resumed.

    Args:
        output_dir: the run's folder.
        checkpoint: checkpoint that the run resumes from, or None.
        overwrites: `overwrite_output_dir`.
        run_config: the run's flat configuration.
    """
    if overwrites and not is_inside(checkpoint, output_dir):
        clear_run(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    clear_leftovers(output_dir)
    write_json(output_dir / "run_config.json", run_config)


def clear_run(output_dir: str | Path) -> None:
    """Remove the checkpoints, weights, logs and results of an earlier run, and keep all other files."""
    folder = Path(output_dir)
    for pattern in _RUN_FILES:
        for path in folder.glob(pattern):
            path.unlink()
    for path in _checkpoint_folders(folder).values():
        _remove(path)
    clear_leftovers(folder)


def _checkpoint_folders(output_dir: str | Path) -> dict[int, Path]:
    """Return all checkpoint folders sorted by step, including incomplete checkpoints."""
    named = [(_CHECKPOINT.fullmatch(path.name), path) for path in Path(output_dir).glob("checkpoint-*")]
    return dict(sorted((int(match[1]), path) for match, path in named if match and path.is_dir()))


def clear_leftovers(output_dir: str | Path) -> None:
    """Remove hidden folders of interrupted writes and removals; restore checkpoints that were not fully replaced."""
    _restore_replaced(Path(output_dir))
    for pattern in _LEFTOVERS:
        for path in Path(output_dir).glob(pattern):
            shutil.rmtree(path)


def _restore_replaced(output_dir: Path) -> None:
    for path in output_dir.glob(".checkpoint-*.replaced"):
        restore_replaced(path.with_name(path.name.removeprefix(".").removesuffix(".replaced")))


def prune_checkpoints(output_dir: str | Path, limit: int | None, step: int, keep: Collection[int | None]) -> None:
    """Remove old checkpoints after a checkpoint is saved.

    Args:
        output_dir: the run's folder.
        limit: number of checkpoints to keep; None or a number below 1: keep all.
        step: step of the saved checkpoint. Checkpoints of later steps are damaged (otherwise the run would have resumed
            from one of them), so they are neither counted nor removed.
        keep: steps whose checkpoints are never removed: the steps of the best evaluation and the last stable
            checkpoint.
    """
    if limit is None or limit < 1:
        return
    checkpoints = {other: path for other, path in list_checkpoints(output_dir).items() if other <= step}
    for other in list(checkpoints)[:-limit]:
        if other not in keep:
            _remove(checkpoints[other])


def remove_later_checkpoints(output_dir: str | Path, step: int, last: int) -> None:
    """Remove the checkpoints of all steps after `step`, up to `last`."""
    for other, path in list_checkpoints(output_dir).items():
        if step < other <= last:
            _remove(path)


def _remove(path: Path) -> None:
    """Rename a folder before removing it, so that an interrupted removal does not leave a broken checkpoint."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)
