"""Answer the prompts of a data file; the answers are written in parts, so that an interrupted run can continue."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.cli.predict_resume import IncompleteFile
from paddlenlp_ext.cli.progress import progress
from paddlenlp_ext.generation.generate import GenerationModel, generate
from paddlenlp_ext.utils.files import check_writable, sole_writer
from paddlenlp_ext.utils.locks import check_no_active_run
from paddlenlp_ext.utils.storage_errors import explained_errors

_BATCHES_PER_PART = 16
"""Number of batches in a part. The prompts of a part are sorted by length, and the answers are written together."""


@dataclass(frozen=True)
class PredictionRow:
    """Row to answer.

    Attributes:
        prompt_ids: ids of the prompt.
        src, tgt: fields of the output line; `tgt` is "" without a reference answer.
    """

    prompt_ids: Sequence[int]
    src: Any
    tgt: Any


def check_output_file(output_file: str | os.PathLike[str], data_file: str | os.PathLike[str]) -> None:
    """Check that the output file can be written.

    Raises:
        ValueError: the output file is the data file or a directory, its directory is not writable, or an active run
            uses the directory.
    """
    output, data = Path(output_file).expanduser(), Path(data_file).expanduser()
    if output.resolve() == data.resolve():
        raise ValueError(
            f"--output_file {output_file} is the data file itself, whose rows would be lost; choose another file"
        )
    if output.is_dir():
        raise ValueError(f"--output_file {output_file} is a directory; name a file in it")
    check_no_active_run(output)
    check_writable(output.parent, f"--output_file {output_file}")


def predict_file(
    model: GenerationModel,
    rows: Sequence[PredictionRow],
    decode: Callable[[Sequence[int]], str],
    output_file: str | os.PathLike[str],
    *,
    batch_size: int,
    inputs: Mapping[str, Any],
    **options: Any,
) -> None:
    """Write one line {"src", "tgt", "output"} for each row, in the order of `rows`.

    Lines are written to `.NAME.incomplete` beside the output file NAME; the complete file is renamed to NAME. An
    interrupted run leaves an earlier output file unchanged. The next run with equal `inputs` continues after the last
    line.

    Args:
        model: the decoder.
        rows: rows to answer; prompts of similar length are decoded together.
        decode: function that decodes token ids to text.
        output_file: file for the lines.
        batch_size: number of prompts decoded together.
        inputs: result of `run_inputs`.
        options: further arguments of `generate`.

    Raises:
        ValueError: the file has lines of an interrupted run with other inputs, or another process is writing the file.
    """
    draft = IncompleteFile(output_file, inputs)
    part_size = batch_size * _BATCHES_PER_PART
    with explained_errors(output_file), sole_writer(Path(output_file).expanduser()):
        done = draft.begin()
        with draft.path.open("a", encoding="utf-8") as lines, progress(len(rows), done, "rows") as advance:
            for first in range(done, len(rows), part_size):
                part = rows[first : first + part_size]
                answers = generate(
                    model,
                    [row.prompt_ids for row in part],
                    batch_size=batch_size,
                    first_row=first,
                    on_row=lambda _, tokens: advance(len(tokens)),
                    **options,
                )
                for row, tokens in zip(part, answers, strict=True):
                    line = {"src": row.src, "tgt": row.tgt, "output": decode(tokens)}
                    lines.write(json.dumps(line, ensure_ascii=False) + "\n")
                lines.flush()
        draft.complete()
