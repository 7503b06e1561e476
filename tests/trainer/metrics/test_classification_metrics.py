"""Precision, recall and F1 of generated labels."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from paddlenlp_ext.config.metric_names import LABEL_METRICS
from paddlenlp_ext.trainer.metrics.classification_metrics import label_report

REFERENCES = ["gold", "gold", "gold", "gold", "ship", "ship", "ship", "tin", "tin", "earn"]
OUTPUTS = ["gold", "gold", "ship", "banana", "ship", "gold", "ship", "tin", "earn", "golden"]


def test_label_report_equals_scikit_learn():
    # precision_recall_fscore_support(REFERENCES, OUTPUTS, labels=sorted(set(REFERENCES)), average=..., zero_division=0)
    # of scikit-learn 1.9.1, for average None, "macro" and "micro".
    report = label_report(OUTPUTS, REFERENCES)
    assert list(report.per_label) == ["earn", "gold", "ship", "tin"]
    expected = [(0, 0, 0, 1), (2 / 3, 1 / 2, 4 / 7, 4), (2 / 3, 2 / 3, 2 / 3, 3), (1, 1 / 2, 2 / 3, 2)]
    np.testing.assert_allclose([astuple(score) for score in report.per_label.values()], expected)
    np.testing.assert_allclose(
        astuple(report.macro), (0.5833333333333333, 0.41666666666666663, 0.47619047619047616, 10)
    )
    np.testing.assert_allclose(astuple(report.micro), (0.625, 0.5, 0.5555555555555556, 10))
    assert report.num_unknown == 2


def test_label_report_equals_the_formula_on_a_confusion_matrix():
    # Labels 0 to 3; 4 stands for an answer that is no label. Label 3 is never the reference, so it is no label either.
    drawn = np.random.default_rng(0)
    truth, answer = drawn.integers(0, 3, 60), drawn.integers(0, 5, 60)
    confusion = np.zeros((3, 5))
    np.add.at(confusion, (truth, answer), 1)
    correct, answered, rows = np.diag(confusion), confusion.sum(0)[:3], confusion.sum(1)
    precision, recall = correct / answered, correct / rows
    f1 = 2 * precision * recall / (precision + recall)
    metrics = label_report([f" {number}\n" for number in answer], [str(number) for number in truth]).metrics()
    np.testing.assert_allclose(metrics["precision_macro"], precision.mean())
    np.testing.assert_allclose(metrics["recall_macro"], recall.mean())
    np.testing.assert_allclose(metrics["f1_macro"], f1.mean())
    all_precision, all_recall = correct.sum() / answered.sum(), correct.sum() / 60
    np.testing.assert_allclose(metrics["precision_micro"], all_precision)
    np.testing.assert_allclose(metrics["recall_micro"], all_recall)
    np.testing.assert_allclose(metrics["f1_micro"], 2 * all_precision * all_recall / (all_precision + all_recall))
    np.testing.assert_allclose(metrics["unknown_labels"], confusion[:, 3:].sum() / 60)


def test_label_report_without_a_known_answer_is_zero():
    report = label_report(["x", "y"], ["a", "b"])
    assert report.metrics() == dict.fromkeys(LABEL_METRICS, 0.0) | {"unknown_labels": 1.0}


def test_label_report_different_lengths_are_an_error():
    with pytest.raises(ValueError, match="got 1 outputs and 2 references"):
        label_report(["a"], ["a", "b"])
