"""Metrics that compare generated answers with reference answers, after extraction by a regular expression."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from paddlenlp_ext.evaluation.row_scores import CORPUS, MEAN, SHARE, Scores
from paddlenlp_ext.trainer.metrics.rouge_bleu import WordTokenizer, bleu4, is_exact_match, rouge_scores
from paddlenlp_ext.utils.last_number import last_number


def extract(text: str, pattern: str | None) -> str | None:
    """Return the last match of a regular expression in a text; None if `pattern` does not match.

    If `pattern` has groups, return the first group of the match. If `pattern` is None, return the whole text.
    """
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    last = matches[-1]
    return (last[1] or "") if last.re.groups else last[0]


def _contains(output: str, reference: str) -> bool:
    return reference.strip().casefold() in output.casefold()


def _same_number(output: str, reference: str) -> bool:
    number = last_number(output)
    return number is not None and number == last_number(reference)


def f1(output: str, reference: str) -> float:
    """Return the F1 score of the words in two texts (SQuAD, arXiv:1606.05250, but without removal of articles)."""
    words, right = (Counter(WordTokenizer().tokenize(text)) for text in (output, reference))
    shared = (words & right).total()
    return 2 * shared / max(1, words.total() + right.total())


_SHARES: Mapping[str, Callable[[str, str], bool]] = {
    "exact_match": is_exact_match,
    "contains": _contains,
    "number": _same_number,
}


def score_answers(metric: str, outputs: Sequence[str | None], references: Sequence[Sequence[str]]) -> Scores:
    """Score the extracted answers with one metric.

    The score of a row is its best score over the reference answers. BLEU uses only the first reference answer.

    Args:
        metric: name of the metric.
        outputs: extracted answer of each row, or None (score 0) if the pattern did not match.
        references: reference answers of each row, at least one.

    Raises:
        ValueError: the library of the metric is not installed.
    """
    if metric == "bleu4":
        value = bleu4([output or "" for output in outputs], [row[0] for row in references])
        return Scores.of_rows(CORPUS, [value])
    pairs = [(output, text) for output, row in zip(outputs, references, strict=True) for text in row]
    if metric in _SHARES:
        kind, values = SHARE, [output is not None and float(_SHARES[metric](output, text)) for output, text in pairs]
    elif metric == "f1":
        kind, values = MEAN, [f1(output or "", text) for output, text in pairs]
    else:
        kind, values = MEAN, rouge_scores([output or "" for output, _ in pairs], [text for _, text in pairs])[metric]
    scored = iter(values)
    return Scores.of_rows(kind, [max(next(scored) for _ in row) for row in references])
