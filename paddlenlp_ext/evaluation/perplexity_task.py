"""Perplexity task: perplexity and bits per byte of the target tokens in rows, or of plain text.

| data | target tokens | unit of the bootstrap |
|---|---|---|
| rows in a fine-tuning format | target tokens of training | row |
| rows with a field of plain text | all | row |
| a .txt file | all | window |

A text longer than `max_length` is split into windows, so that each token is predicted once. The context of a window is
the token before the window. The last window, which may be shorter, has as much context as `max_length` allows.
lm-evaluation-harness uses the same windows:

    tokens  a b c d e f g h      max_length 3, start token s

    prompt      s | c   | e f
    predicted   a b c | d e f | g h
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.data.prediction_prompts import parse_file
from paddlenlp_ext.data.readers.dataset_files import read_rows
from paddlenlp_ext.data.rows.checked_values import read_member, read_object, read_text
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.data.tokenization.row_encoder import encode_rows
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.evaluation.log_likelihood import Continuation, log_likelihoods, row_losses
from paddlenlp_ext.evaluation.prompt_encoder import PromptEncoder
from paddlenlp_ext.evaluation.row_scores import BITS, RATIO_EXP, Scores
from paddlenlp_ext.evaluation.task import Measured, Task
from paddlenlp_ext.evaluation.task_options import TaskOptions

EMPTY_TEXT = "empty text"


@dataclass(frozen=True)
class Units:
    """Sequences to score, grouped into the units that the bootstrap resamples.

    Attributes:
        sequences: windows of texts, or tokenized rows.
        unit_of: index of the unit of each sequence, int [sequences].
        num_tokens: number of target tokens of each unit, float [units].
        num_bytes: number of UTF-8 bytes of each unit's target text, float [units].
    """

    sequences: Sequence[Continuation] | Sequence[EncodedRow]
    unit_of: np.ndarray
    num_tokens: np.ndarray
    num_bytes: np.ndarray


class Perplexity(Task):
    """Task that measures perplexity and bits per byte."""

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        assert options.data_file is not None, "checked by TaskOptions"
        file = Path(options.data_file).expanduser()
        self.texts: list[str] | None = None
        self.rows: list[SourceRow | InvalidRow] = []
        self.is_one_text = file.suffix == ".txt"
        if self.is_one_text:
            if options.text is not None or options.limit is not None:
                raise ValueError(f"{options.title}: a .txt file has no rows; remove text and limit")
            self.texts = [_read_text_file(file)]
        elif options.text is not None:
            self.texts = parse_file(file, lambda value: _read_plain_text(value, options.text or ""), options.limit)
        else:
            parse_file(file, lambda value: read_object(value, ()), options.limit)
            self.rows = list(read_rows(file))[: options.limit]

    def encode(self, encoder: PromptEncoder) -> Units:
        return self._encode_rows(encoder) if self.texts is None else self._encode_texts(self.texts, encoder)

    def _encode_texts(self, texts: Sequence[str], encoder: PromptEncoder) -> Units:
        windows, unit_of, num_bytes = [], [], []
        start, prefix = encoder.start_ids[-1], len(encoder.template.encoder.prefix_ids)
        for number, text in enumerate(texts):
            text_windows = list(rolling_windows(encoder.text(text)[prefix:], start, encoder.max_length))
            windows += text_windows
            if self.is_one_text:
                unit_of += range(len(text_windows))
                # A window can end within a character, and decoded text can differ from the original text. The byte
                # count of the text is therefore divided among the windows in proportion to their decoded lengths.
                decoded = [len(encoder.tokenizer.decode(list(window.tokens)).encode()) for window in text_windows]
                num_bytes += [len(text.encode()) * count / sum(decoded) for count in decoded]
            else:
                unit_of += [number] * len(text_windows)
                num_bytes.append(len(text.encode()))
        units = np.array(unit_of)
        num_tokens = np.bincount(units, [len(each.tokens) for each in windows])
        return Units(windows, units, num_tokens, np.array(num_bytes, float))

    def _encode_rows(self, encoder: PromptEncoder) -> Units:
        limits = LengthLimits(encoder.max_length, encoder.max_length, "left")
        rows, num_bytes = [], []
        for tokenized in encode_rows(self.rows, encoder.template, limits):
            if isinstance(tokenized, InvalidRow):
                raise ValueError(f"{self.options.title}: {tokenized}")
            rows.append(EncodedRow(tokenized.tokens, tokenized.loss_mask, len(rows)))
            num_bytes.append(len(encoder.decode(tokenized.tokens[tokenized.loss_mask].tolist()).encode()))
        num_tokens = np.array([row.loss_mask.sum() for row in rows], float)
        return Units(rows, np.arange(len(rows)), num_tokens, np.array(num_bytes, float))

    def num_units(self, encoded: Units) -> int:
        return len(encoded.sequences)

    def measure(
        self, model: Any, encoded: Units, encoder: PromptEncoder, batch_size: int, advance: Callable[[int], object]
    ) -> Measured:
        sequences: Any = encoded.sequences
        if self.texts is None:
            losses = row_losses(model, sequences, batch_size=batch_size, advance=advance)
        else:
            options = {"batch_size": batch_size, "max_length": encoder.max_length, "advance": advance}
            losses = np.array([-each.logprob for each in log_likelihoods(model, sequences, **options)])
        losses = np.bincount(encoded.unit_of, losses).astype(float)
        windows = tuple(encoded.num_bytes.tolist()) if self.is_one_text else ()
        scores = {
            "perplexity": Scores(RATIO_EXP, losses, encoded.num_tokens, windows),
            "bits_per_byte": Scores(BITS, losses / math.log(2), encoded.num_bytes, windows),
        }
        return Measured({name: scores[name] for name in self.options.metric_names})


def rolling_windows(tokens: Sequence[int], start: int, max_length: int) -> Iterator[Continuation]:
    """Yield windows that together predict every token of a text once.

    Args:
        tokens: token ids of the text.
        start: token id to put before the first token, such as BOS.
        max_length: maximum number of input tokens of a window.
    """
    yield Continuation([start], tokens[:max_length])
    for done in range(max_length, len(tokens), max_length):
        end = min(done + max_length, len(tokens))
        yield Continuation(tokens[end - max_length - 1 : done], tokens[done:end])


def _read_plain_text(value: Any, field: str) -> str:
    text = read_text(read_member(read_object(value, ()), field, ()), (field,))
    if not text.strip():
        raise InvalidRowError(EMPTY_TEXT, f"{field} is empty; add text or remove the row", (field,))
    return text


def _read_text_file(file: Path) -> str:
    if not file.is_file():
        raise ValueError(f"data_file: {str(file)!r} is not a file; pass the path of a text file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: byte {error.start} is not valid UTF-8; save the file as UTF-8") from None
    if not text.strip():
        raise ValueError(f"{file}: the file is empty; add text")
    return text
