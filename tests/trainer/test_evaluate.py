"""Metrics of the eval split, computed from the loss and from generated answers."""

from __future__ import annotations

import json
import math

import numpy as np
import paddle
import pytest

from paddlenlp_ext.data.collate import build_collate
from paddlenlp_ext.trainer.evaluate import evaluate_generation, evaluate_loss, evaluation_mode
from paddlenlp_ext.trainer.single_process import SingleProcess
from paddlenlp_ext.trainer.stopping.early_stopping import BestMetricTracker
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import VOCABULARY, Rows, Tokenizer, make_config, make_model

ROWS = Rows(13, seed=6)


class ReversedRows(Rows):
    """Rows in reverse order."""

    def __init__(self):
        super().__init__(13, seed=6)
        self.rows = self.rows[::-1]
        self.lengths = self.lengths[::-1].copy()


def evaluate(tmp_path, rows=ROWS, model=None, **keys):
    config = make_config(tmp_path / "run", **keys)
    return Trainer(model or make_model(), config, None, rows, Tokenizer()).evaluate()


def expected_metrics(model, rows):
    total = correct = count = 0
    for row in rows:
        with paddle.no_grad():
            logits = model(paddle.to_tensor(row.tokens[None, :-1].astype("int64"))).numpy()[0].astype("float64")
        log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        is_target, targets = row.loss_mask[1:], row.tokens[1:]
        total -= log_probabilities[np.arange(len(targets)), targets][is_target].sum()
        correct += (logits.argmax(-1) == targets)[is_target].sum()
        count += is_target.sum()
    return total / count, correct / count, count


def test_evaluate_loss_equals_the_metrics_of_single_rows(tmp_path):
    model = make_model()
    # Make some predictions correct.
    rows = Rows(13, seed=6)
    for row in rows.rows[:5]:
        with paddle.no_grad():
            best = model(paddle.to_tensor(row.tokens[None, :-1].astype("int64")))[0].argmax(-1).numpy()
        row.tokens[-1] = best[-1]
    loss, accuracy, count = expected_metrics(model, rows.rows)
    metrics = evaluate(tmp_path, rows, model, per_device_eval_batch_size=3)
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["eval_accuracy"] == pytest.approx(accuracy)
    assert accuracy > 0
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert (metrics["eval_num_target_tokens"], metrics["eval_num_rows"]) == (count, 13)
    assert metrics["eval_samples_per_second"] == pytest.approx(13 / metrics["eval_runtime"])
    assert metrics["eval_tokens_per_second"] == pytest.approx(rows.lengths.sum() / metrics["eval_runtime"])
    assert json.loads((tmp_path / "run" / "eval_results.json").read_text()) == metrics
    assert json.loads((tmp_path / "run" / "all_results.json").read_text()) == metrics


def test_evaluate_loss_does_not_depend_on_order_or_batching(tmp_path):
    first = evaluate(tmp_path)
    again = evaluate(tmp_path)
    assert first["eval_loss"] == again["eval_loss"]
    for other in (evaluate(tmp_path, ReversedRows()), evaluate(tmp_path, per_device_eval_batch_size=1)):
        assert other["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-6)
        assert other["eval_accuracy"] == first["eval_accuracy"]


def test_evaluate_loss_max_evaluate_steps_takes_the_first_batches(tmp_path):
    loss, accuracy, count = expected_metrics(make_model(), ROWS.rows[:6])
    metrics = evaluate(tmp_path, per_device_eval_batch_size=3, max_evaluate_steps=2)
    assert (metrics["eval_num_rows"], metrics["eval_num_target_tokens"]) == (6, count)
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["eval_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize(("greater", "better", "worse"), [(True, 2.0, 0.5), (False, 0.5, 2.0)])
def test_best_metric_tracker_neither_a_tie_nor_nan_improves(tmp_path, greater, better, worse):
    tracker = BestMetricTracker(make_config(tmp_path, metric_for_best_model="loss", greater_is_better=greater).train)
    assert tracker.improves(better, 1.0) and tracker.improves(worse, None)
    assert not any(tracker.improves(value, 1.0) for value in (1.0, worse, math.nan))
    assert not tracker.improves(math.nan, None)


def test_evaluate_loss_switches_dropout_and_noise_off(tmp_path):
    model = make_model(lora=True, dropout=0.5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.set_value(paddle.randn(parameter.shape))
    model.train()
    assert evaluate(tmp_path, model=model)["eval_loss"] == evaluate(tmp_path, model=model)["eval_loss"]
    assert model.training
    with evaluation_mode(model):
        assert not model.training and not paddle.is_grad_enabled()


def test_evaluate_generation_scores_and_writes_answers(tmp_path):
    rows = Rows(4, seed=8)

    class Oracle:
        """Model that generates the references, except for the first row."""

        training = False

        def __init__(self, model):
            self.model = model

        def __getattr__(self, name):
            return getattr(self.model, name)

        def generate(self, prompts, *, max_new_tokens, decode_strategy, seed, **options):
            assert (max_new_tokens, decode_strategy, seed) == (16, "greedy_search", 42)
            assert "eos_token_id" not in options  # the model's own end tokens apply
            assert [list(prompt) for prompt in prompts] == [prompt for prompt, _, _ in rows.prompts()]
            return [[1, 2, 3], *(row.tokens[row.loss_mask].tolist() for row in rows.rows[1:])]

    metrics = evaluate(tmp_path, rows, Oracle(make_model()), eval_with_do_generation=True, save_generation_output=True)
    assert metrics["eval_exact_match"] == 0.75
    assert 0.74 < metrics["eval_rouge1"] < 1.0
    assert {"eval_rouge2", "eval_rougel", "eval_bleu4", "eval_loss"} <= metrics.keys()
    lines = [json.loads(line) for line in (tmp_path / "run" / "generated_output.json").read_text().splitlines()]
    assert lines[0]["output"] == "w1 w2 w3"
    assert lines[1]["output"] == lines[1]["tgt"]
    assert [line["src"] for line in lines] == [f"question {index}" for index in range(4)]


def test_evaluate_generation_of_labels_writes_the_score_of_each(tmp_path):
    metrics = evaluate(tmp_path, Rows(4, seed=8), make_model(), eval_with_do_generation=True, eval_labels=True)
    assert metrics["eval_f1_macro"] == metrics["eval_exact_match"] == 0.0
    assert metrics["eval_unknown_labels"] == 1.0
    scores = json.loads((tmp_path / "run" / "label_scores.json").read_text())
    assert sum(score["num_rows"] for score in scores.values()) == 4
    assert all(score.keys() == {"precision", "recall", "f1", "num_rows"} for score in scores.values())


def test_evaluate_loss_called_directly_counts_the_batches_of_its_replica(tmp_path):
    """Compare one process, which is the default, with the second of two replicas: it has batches 1 and 3 of 5."""
    model, collate = (
        make_model(),
        build_collate(ROWS, make_config(tmp_path).data, pad_token_id=0, vocab_size=VOCABULARY),
    )
    alone = evaluate_loss(model, ROWS, collate, batch_size=3)
    assert alone["eval_loss"] == pytest.approx(expected_metrics(model, ROWS.rows)[0], rel=1e-6)
    assert alone["eval_num_rows"] == 13
    half = evaluate_loss(model, ROWS, collate, batch_size=3, process_group=SecondOfTwo([]))
    assert half["eval_num_rows"] == 6
    assert half["eval_loss"] == pytest.approx(expected_metrics(model, ROWS.rows[3:6] + ROWS.rows[9:12])[0], rel=1e-6)


class SecondOfTwo(SingleProcess):
    """Process group of the second of two replicas; the first one's answers are given."""

    index, size = 1, 2

    def __init__(self, answers_of_first):
        self.answers_of_first = answers_of_first

    def gather_objects(self, value):
        return [self.answers_of_first, value]


def test_evaluate_generation_on_a_replica_numbers_its_prompts_among_all(tmp_path):
    """Check that the draws of a prompt follow from its number in the eval split, and not on the replica."""
    rows, calls = Rows(5, seed=8), []
    answers = [row.tokens[row.loss_mask].tolist() for row in rows.rows]

    class Recorder:
        def generate(self, prompts, *, first_row, seed, **options):
            calls.append((prompts, first_row, seed))
            return answers[first_row:]

    config, tokenizer = make_config(tmp_path, eval_with_do_generation=True, top_k=0, seed=3), Tokenizer()
    group = SecondOfTwo([tokenizer.decode(answer) for answer in answers[:2]])
    file = tmp_path / "answers.json"
    metrics = evaluate_generation(Recorder(), rows, tokenizer, config, file, group)
    assert calls == [([prompt for prompt, _, _ in rows.prompts()][2:], 2, 3)]
    assert metrics["eval_exact_match"] == 1.0 and len(file.read_text().splitlines()) == 5


def test_evaluate_loss_without_target_tokens_is_an_error(tmp_path):
    rows = Rows(3)
    for row in rows.rows:
        row.loss_mask[:] = False
    with pytest.raises(ValueError, match="no target token"):
        evaluate(tmp_path, rows)


class NotMain(SingleProcess):
    """Process group of a process that is not the main one, whose own metrics and evaluation are given."""

    is_main = False

    def from_main(self, value):
        return {"words": 3.0} if value is None else {**value, "eval_few_loss": 0.25}


def test_evaluate_takes_the_metrics_of_the_main_process(tmp_path):
    """Check that another process neither calls the user's function nor decides by its own numbers."""
    config = make_config(tmp_path, eval_with_do_generation=True, max_new_tokens=2)
    sets = {"few": Rows(2, seed=8), "more": Rows(3, seed=9)}
    trainer = Trainer(
        make_model(),
        config,
        None,
        sets,
        Tokenizer(),
        compute_metrics=lambda rows: pytest.fail("called on a process that is not the main one"),
        process_group=NotMain(),
    )
    metrics = trainer.evaluate()
    assert (metrics["eval_few_words"], metrics["eval_more_words"]) == (3.0, 3.0)
    assert (metrics["eval_few_loss"], metrics["eval_more_num_rows"]) == (0.25, 3)
    assert not list(tmp_path.glob("*results.json"))
