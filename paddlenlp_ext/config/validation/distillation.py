"""Rules about distillation: what it needs, and what it cannot be combined with."""

from __future__ import annotations

from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.distillation import DistillationConfig
from paddlenlp_ext.config.sections.parallel import ParallelConfig
from paddlenlp_ext.config.validation.parallel import LAYOUT_KEYS, check_whole_model
from paddlenlp_ext.config.validation.rules import Rules

rules = Rules()
_TEACHER = ("teacher_model_name_or_path", "teacher_logps_path")
_FOR_STORED_ANSWERS = {
    "autoregressive": "plain text has no prompts to sample answers from",
    "zero_padding": "packs are filled by the lengths of the stored answers, and sampled answers have other lengths",
    "pad_to_max_length": "sampled answers may be longer than max_length",
    "use_pose_convert": "answers are sampled with consecutive position ids",
}
"""Data key that distillation_lmbda excludes -> reason; share_prefix needs zero_padding."""


@rules(*LAYOUT_KEYS, *_TEACHER)
def _each_process_has_the_teacher(distillation: DistillationConfig, parallel: ParallelConfig, report: Report) -> None:
    if distillation.is_on:
        check_whole_model(parallel, "distillation compares full logits", report)


@rules("teacher_logps_path", "lazy")
def _stored_rows_are_numbered(distillation: DistillationConfig, data: DataConfig, report: Report) -> None:
    if distillation.teacher_logps_path is not None and data.lazy:
        message = "teacher_logps_path: the rows of a stream are not numbered; set lazy: false, or leave the key out"
        report.error(message, "teacher_logps_path", "lazy")


@rules("teacher_logps_path", "use_pose_convert")
def _stored_rows_have_fixed_positions(distillation: DistillationConfig, data: DataConfig, report: Report) -> None:
    if distillation.teacher_logps_path is not None and data.use_pose_convert:
        report.error(
            "teacher_logps_path: with use_pose_convert, the position ids of a row change in each epoch; leave out one "
            "of the two keys",
            "teacher_logps_path",
            "use_pose_convert",
        )


@rules("distillation_lmbda", "teacher_logps_path")
def _stored_logps_are_of_stored_answers(distillation: DistillationConfig, report: Report) -> None:
    if distillation.samples_answers and distillation.teacher_logps_path is not None:
        report.error(
            "distillation_lmbda: the teacher must compute the log-probabilities of sampled answers; leave out "
            "teacher_logps_path",
            "distillation_lmbda",
            "teacher_logps_path",
        )


@rules("distillation_lmbda", *_FOR_STORED_ANSWERS)
def _sampled_answers_have_other_lengths(distillation: DistillationConfig, data: DataConfig, report: Report) -> None:
    for key, reason in _FOR_STORED_ANSWERS.items():
        if distillation.samples_answers and getattr(data, key):
            report.error(f"distillation_lmbda: {reason}; set {key}: false", "distillation_lmbda", key)


@rules(*(option.key for option in options_of(DistillationConfig, "")))
def _note_idle_keys(distillation: DistillationConfig, report: Report) -> None:
    for option in options_of(DistillationConfig, ""):
        if option.key in _TEACHER or not report.is_set(option.key):
            continue
        if not distillation.is_on:
            reason = "the run has no teacher (teacher_model_name_or_path)"
        elif option.key == "teacher_top_k" and distillation.teacher_logps_path is None:
            reason = "teacher_logps_path is not set"
        elif option.key == "teacher_weight_quantize_algo" and distillation.teacher_model_name_or_path is None:
            reason = "teacher_model_name_or_path is not set"
        else:
            continue
        if getattr(distillation, option.attribute) != option.default:
            report.note(f"{option.key} has no effect: {reason}", option.key)
