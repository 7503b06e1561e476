"""Program llm/run_evaluation.py: score a model, or compare it with its adapter and the merged model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paddlenlp_ext.evaluation.arguments import EvaluationArguments
from paddlenlp_ext.evaluation.build_tasks import build_tasks
from paddlenlp_ext.evaluation.compare_models import find_candidates, measure
from paddlenlp_ext.evaluation.plot_scores import plot_scores
from paddlenlp_ext.evaluation.report import Evaluation, print_tables, write_report
from paddlenlp_ext.evaluation.task_options import TaskOptions
from paddlenlp_ext.inference.load_model import find_model_and_adapter
from paddlenlp_ext.utils.files import check_writable
from paddlenlp_ext.utils.locks import check_no_active_run, run_lock
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.evaluation")


def run_evaluation(arguments: EvaluationArguments, options: Sequence[TaskOptions]) -> None:
    """Measure all models on all tasks, print the tables and write the report.

    Raises:
        ValueError: a model, adapter, template, task or row cannot be used; or output_dir cannot be written, or an
            active run uses it. Rows are checked before a model is loaded.
    """
    folder = Path(arguments.output_dir).expanduser()
    check_no_active_run(folder)
    check_writable(folder, f"--output_dir {folder}")
    with run_lock(folder):
        _run(arguments, options, folder)


def _run(arguments: EvaluationArguments, options: Sequence[TaskOptions], folder: Path) -> None:
    base, adapter = find_model_and_adapter(arguments)
    candidates, tasks = find_candidates(arguments, base, adapter), build_tasks(options)
    measured = {each.label: measure(each, tasks, arguments, [adapter, base]) for each in candidates}
    models = {each.label: {"base": each.base, "adapter": each.adapter, "merged": each.is_merged} for each in candidates}
    evaluation = Evaluation(tasks, list(models), measured, arguments.seed, {"models": models})
    lines = write_report(evaluation, folder, arguments.num_examples)
    plot_scores(lines, evaluation.models, folder / "scores.png")
    print_tables(evaluation, lines)
    logger.info("report written to %s", folder / "report.md")
