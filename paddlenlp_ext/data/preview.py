"""Print tokenized rows with target tokens highlighted (`--preview_data N`)."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow, TokenizedRow
from paddlenlp_ext.data.training_rows import TrainingRows

CONTEXT_STYLE = "dim"
TARGET_STYLES = ("bold green", "bold green underline")
"""Styles of even and odd target tokens; alternating styles make token boundaries visible."""
TARGET_BRACKETS = ("⟦", "⟧")
"""Brackets around target spans in output without colors."""


def preview_rows(dataset: TrainingRows, tokenizer: Any, num_rows: int, console: Console | None = None) -> None:
    """Print the first rows of a dataset with target tokens in color.

    Args:
        dataset: a tokenized split, or a stream.
        tokenizer: the tokenizer of the dataset.
        num_rows: number of rows to print.
        console: console of the output; None: standard output.
    """
    console = console or Console()
    legend = Text("legend: ")
    legend.append("context", CONTEXT_STYLE)
    legend.append("  ")
    legend.append("target", TARGET_STYLES[0])
    legend.append(" (every second token is underlined; ⟦ ⟧ without colors; ⏎ is a line break in the target)")
    console.print(legend)
    marked = console.color_system is None
    previous, part = None, 1
    for row in dataset.head(num_rows):
        file, line = dataset.source(row.row_index)
        part = part + 1 if (file, line) == previous else 1
        previous = (file, line)
        place = f"{file}:{line}" + (f", example {part}" if part > 1 else "")
        num_target_tokens = int(row.loss_mask.sum())
        title = f"row {row.row_index}  {place}  {len(row.tokens)} tokens, {num_target_tokens} target tokens"
        console.print(Text(f"--- {title}", "bold"), soft_wrap=True)
        console.print(style_row(row, tokenizer, marked), soft_wrap=True)


def style_row(row: EncodedRow | TokenizedRow, tokenizer: Any, marked: bool = False) -> Text:
    """Return the text of a row, styled by its loss mask.

    Args:
        row: a row; the sequences of a row with several sequences, such as a preference pair, get headings.
        tokenizer: the tokenizer of the row.
        marked: whether to put brackets around spans of target tokens.
    """
    text = Text()
    for name, tokens, mask in row.parts:
        if name:
            text.append("\n" if text else "")
            text.append(f"{name}:\n", "bold")
        _append_tokens(text, tokens.tolist(), mask.tolist(), tokenizer, marked)
    return text


def _append_tokens(text: Text, tokens: list[int], mask: list[bool], tokenizer: Any, marked: bool) -> None:
    start = 0
    while start < len(tokens):
        end = _end_of_run(mask, start)
        if mask[start]:
            text.append(TARGET_BRACKETS[0] if marked else "")
            for number, piece in enumerate(_pieces(tokens[start:end], tokenizer)):
                text.append(piece.replace("\n", "⏎\n"), TARGET_STYLES[number % 2])
            text.append(TARGET_BRACKETS[1] if marked else "")
        else:
            text.append(tokenizer.decode(tokens[start:end], clean_up_tokenization_spaces=False), CONTEXT_STYLE)
        start = end


def _end_of_run(flags: list[bool], start: int) -> int:
    end = start
    while end < len(flags) and flags[end] == flags[start]:
        end += 1
    return end


def _pieces(tokens: list[int], tokenizer: Any) -> list[str]:
    """Return the text of every token; consecutive tokens that encode one character together share one text."""
    pieces: list[str] = []
    held: list[int] = []
    for token in tokens:
        held.append(token)
        piece = tokenizer.decode(held, clean_up_tokenization_spaces=False)
        if not piece.endswith("\ufffd"):
            pieces.append(piece)
            held = []
    return pieces + ([tokenizer.decode(held)] if held else [])
