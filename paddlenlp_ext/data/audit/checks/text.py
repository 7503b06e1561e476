"""Checks of the text of a row."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

from paddlenlp_ext.data.audit.audited_row import PLAIN_TEXT, AuditedRow, Hit, TokenizerInfo, check, questions
from paddlenlp_ext.data.audit.findings import ERROR, NOTE, WARNING, excerpt
from paddlenlp_ext.data.rows.conversation import ASSISTANT, USER
from paddlenlp_ext.data.templates.plain import PlainTemplate

# Characters to which cp1252 and Latin-1 decode the continuation bytes 0x80 to 0xbf of UTF-8.
_CONTINUATION = "[\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
_MOJIBAKE = re.compile(
    f"(?<![A-ZÀ-Þ])[ÂÃ]{_CONTINUATION}|â[€‚„]{_CONTINUATION}?|ðŸ{_CONTINUATION}"
    f"|(?:[ÐÑ]{_CONTINUATION}){{2}}|(?:[ÎÏ]{_CONTINUATION}){{3}}|(?:[ã-é]{_CONTINUATION}{{2}}){{2}}"
)
# Control characters except tab, line feed and carriage return; separators of lines and paragraphs; zero-width spaces,
# word joiners and byte order marks; bidirectional embeddings, overrides and isolates. The pattern leaves out zero-width
# joiners and direction marks, which are part of correct text in some scripts.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u2028\u2029\u202a-\u202e\u2060\u2066-\u2069\ufeff]")
_REPLACEMENT = re.compile("\ufffd")
_MARKERS = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|begin_of_text|endoftext|user|assistant|system)\|>"
    r"|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|</s>|<[｜|](?:User|Assistant)[｜|]>"
)
_HEADINGS = re.compile(r"^(?:###? ?(?:Instruction|Response|Human|Assistant)):", re.MULTILINE)
_HTML = re.compile(
    r"</?(?:p|br|div|span|b|i|u|li|ul|ol|table|tr|td|th|h[1-6]|strong|em|font|script|style)(?:\s[^<>]{0,200})?/?>"
    r"|<a\s[^<>]{0,200}>|<img\s[^<>]{0,200}>|&(?:nbsp|amp|lt|gt|quot|#\d{2,5});",
    re.IGNORECASE,
)
_ABOUT_HTML = re.compile(r"```|\bx?html\b|\bxml\b|\bmarkup\b|<!DOCTYPE", re.IGNORECASE)
_REFUSAL = re.compile(
    r"\bas an? (?:AI|artificial intelligence|large language model|language model)\b(?! engineer| researcher)"
    r"|\bI(?:'m| am) sorry,? but I (?:can't|cannot|am unable|am not able)"
    r"|\bI (?:can't|cannot) (?:fulfil|assist with|help with|comply with) (?:that|this|your)"
    r"|作为一个(?:人工智能|AI|大型?语言模型|语言模型)",
    re.IGNORECASE,
)
_LONG_ANSWER = 400
_REPEATED_RATIO = 0.06


@check(
    "special token in the text", ERROR, "remove the token from the text: the model treats it as part of the template"
)
def special_token(row: AuditedRow, info: TokenizerInfo) -> Iterator[Hit]:
    """Yield special tokens of the tokenizer that occur in texts."""
    return row.search(info.special)


@check("marker of another template", WARNING, "remove the marker, or write the turns as messages")
def other_marker(row: AuditedRow, info: TokenizerInfo) -> Iterator[Hit]:
    """Yield markers of well-known chat templates, except special tokens of the run's tokenizer."""
    for part in row.parts:
        for match in _MARKERS.finditer(part.text):
            if not info.special.fullmatch(match[0]):
                yield Hit(excerpt(part.text, *match.span()), part.path)
                break
        else:
            # Without a chat template, users may write headings such as "### Instruction:" on purpose.
            heading = None if isinstance(info.template, PlainTemplate) else _HEADINGS.search(part.text)
            if heading is not None:
                yield Hit(excerpt(part.text, *heading.span()), part.path)


@check("replacement character", ERROR, "read the source again in its original encoding: U+FFFD replaces lost text")
def replacement_character(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield U+FFFD, which replaces bytes that a decoder could not decode."""
    return row.search(_REPLACEMENT)


@check("wrong encoding", WARNING, "read the source as UTF-8: read as Latin-1 or Windows-1252, é becomes Ã©")
def mojibake(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield UTF-8 text that was decoded as Latin-1 or Windows-1252."""
    return row.search(_MOJIBAKE)


@check("control character", WARNING, "remove invisible characters")
def control_character(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield control characters and other invisible characters."""
    return row.search(_CONTROL)


@check("HTML", WARNING, "remove tags and entities, unless the model should write HTML")
def html(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield HTML tags and entities, except in rows with code blocks or about HTML."""
    hits = list(row.search(_HTML))
    return iter(() if hits and _ABOUT_HTML.search(row.text) else hits)


@check("refusal", NOTE, "remove the row, unless the model should refuse such requests")
def refusal(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield stock phrases in which assistants refuse a request."""
    return row.search(_REFUSAL, ASSISTANT)


@check("repeated text", WARNING, "remove the row: its text repeats itself")
def repeated_text(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield long answers and long plain texts that compress to less than 6 % of their size."""
    for part in row.parts:
        if part.role in (ASSISTANT, PLAIN_TEXT) and len(part.text) >= _LONG_ANSWER:
            content = part.text.encode()
            if len(zlib.compress(content, 1)) < _REPEATED_RATIO * len(content):
                yield Hit(excerpt(part.text), part.path)


@check("empty question", NOTE, "write the question, unless the model should answer without a question")
def empty_question(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield empty user messages."""
    return (Hit(excerpt(row.text), part.path) for part in questions(row) if not part.text.strip())


@check("question without answer", NOTE, "add the answer: messages after the last answer are not used for training")
def unanswered_question(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield the last message of a row if it is a user message."""
    for part in row.parts[-1:]:
        if part.role == USER:
            yield Hit(excerpt(part.text), part.path)


@check("answer equals question", WARNING, "check the row: its answer repeats the question")
def repeated_question(row: AuditedRow, _info: TokenizerInfo) -> Iterator[Hit]:
    """Yield answers that equal the previous message."""
    for before, part in zip(row.parts, row.parts[1:], strict=False):
        if part.role == ASSISTANT and before.role != ASSISTANT and part.text.strip() == before.text.strip() != "":
            yield Hit(excerpt(part.text), part.path)
