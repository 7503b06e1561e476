"""Similarity of generated texts to their references: ROUGE-1/2/L, BLEU-4 and exact match, each between 0 and 1."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from types import ModuleType

# Scripts without spaces between words. Each character counts as a word, as is common for ROUGE in Chinese.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_UNSPACED_CHARACTER = re.compile(f"[{_UNSPACED}]")


class WordTokenizer:
    """Tokenizer for lowercase words in any script. The default tokenizer of rouge-score drops non-ASCII text."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words in order, without punctuation."""
        return _WORD.findall(text.lower())


def text_metrics(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Compute ROUGE, BLEU-4 and exact match of outputs against references, each between 0 and 1.

    Returns:
        Mean F-measures rouge1, rouge2 and rougel; corpus-level bleu4; and exact_match, the fraction of outputs that
        equal their reference except for surrounding whitespace.

    Raises:
        ValueError: `outputs` is empty, `outputs` and `references` differ in length, or a metric library is not
            installed.
    """
    if not outputs or len(outputs) != len(references):
        raise ValueError(
            f"text metrics need outputs and a reference for each output; got {len(outputs)} outputs and "
            f"{len(references)} references"
        )
    exact = [is_exact_match(output, reference) for output, reference in zip(outputs, references, strict=True)]
    return {
        **{name: sum(scores) / len(scores) for name, scores in rouge_scores(outputs, references).items()},
        "bleu4": bleu4(outputs, references),
        "exact_match": sum(exact) / len(exact),
    }


def is_exact_match(output: str, reference: str) -> bool:
    """Return whether two texts are equal except for surrounding whitespace."""
    return output.strip() == reference.strip()


def rouge_scores(outputs: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Return the F-measures rouge1, rouge2 and rougel of each output against its reference.

    Raises:
        ValueError: the library is not installed.
    """
    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = _library("rouge_score.rouge_scorer").RougeScorer(kinds, tokenizer=WordTokenizer())
    scores = [scorer.score(reference, output) for output, reference in zip(outputs, references, strict=True)]
    return {kind.lower(): [score[kind].fmeasure for score in scores] for kind in kinds}


def bleu4(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Return corpus-level BLEU-4, between 0 and 1.

    Raises:
        ValueError: the library is not installed.
    """
    tokenize = "zh" if any(_UNSPACED_CHARACTER.search(reference) for reference in references) else "13a"
    return _library("sacrebleu").corpus_bleu(list(outputs), [list(references)], tokenize=tokenize).score / 100


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"ROUGE or BLEU needs the package {error.name}; run: pip install 'paddlenlp-ext[metrics]'"
        ) from error
