"""Precision, recall and F1 of generated labels, per label and averaged, for rows whose answers are class labels.

The labels are the distinct reference answers. A generated answer that is not a label counts as wrong: it lowers the
recall of the reference label, but does not affect precision. A ratio with a denominator of 0 is 0.

    precision = correct answers with the label / answers with the label
    recall    = correct answers with the label / rows with the label as reference
    F1        = 2 precision recall / (precision + recall)
    macro     : unweighted mean over the labels
    micro     : ratios of counts summed over all labels
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

AVERAGES = ("macro", "micro")
RATIOS = ("precision", "recall", "f1")


@dataclass(frozen=True)
class LabelScore:
    """Precision, recall and F1 of a label or an average, between 0 and 1, and the number of rows."""

    precision: float
    recall: float
    f1: float
    num_rows: int

    @classmethod
    def of_counts(cls, num_correct: int, num_answers: int, num_rows: int) -> LabelScore:
        """Compute the score from counts; F1 is 2 correct / (answers + rows)."""
        return cls(
            num_correct / num_answers if num_answers else 0.0,
            num_correct / num_rows if num_rows else 0.0,
            2 * num_correct / (num_answers + num_rows) if num_rows else 0.0,
            num_rows,
        )


@dataclass(frozen=True)
class LabelReport:
    """Scores of a classification.

    Attributes:
        per_label: score of each label, in alphabetical order.
        macro: unweighted means over the labels.
        micro: ratios of counts summed over all labels.
        num_unknown: number of generated answers that are not a label.
    """

    per_label: dict[str, LabelScore]
    macro: LabelScore
    micro: LabelScore
    num_unknown: int

    def metrics(self) -> dict[str, float]:
        """Return precision_macro, ..., f1_micro and unknown_labels, the fraction of answers that are not a label."""
        averages = {"macro": self.macro, "micro": self.micro}
        values = {f"{ratio}_{name}": getattr(averages[name], ratio) for name in AVERAGES for ratio in RATIOS}
        return {**values, "unknown_labels": self.num_unknown / self.micro.num_rows}

    def scores(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, f1 and num_rows by label."""
        return {label: asdict(score) for label, score in self.per_label.items()}


def label_report(outputs: Sequence[str], references: Sequence[str]) -> LabelReport:
    """Compute the scores of generated labels; surrounding whitespace is ignored.

    Raises:
        ValueError: `outputs` is empty, or `outputs` and `references` differ in length.
    """
    if not outputs or len(outputs) != len(references):
        raise ValueError(
            f"label metrics need outputs and a reference for each output; got {len(outputs)} outputs and "
            f"{len(references)} references"
        )
    answers, truths = [text.strip() for text in outputs], [text.strip() for text in references]
    rows, answered = Counter(truths), Counter(answers)
    correct = Counter(truth for answer, truth in zip(answers, truths, strict=True) if answer == truth)
    labels = sorted(rows)
    per_label = {label: LabelScore.of_counts(correct[label], answered[label], rows[label]) for label in labels}
    num_known = sum(answered[label] for label in labels)
    scores = per_label.values()
    precision, recall, f1 = (sum(getattr(score, ratio) for score in scores) / len(labels) for ratio in RATIOS)
    return LabelReport(
        per_label,
        LabelScore(precision, recall, f1, len(truths)),
        LabelScore.of_counts(correct.total(), num_known, len(truths)),
        len(truths) - num_known,
    )
