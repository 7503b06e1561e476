"""Load and check the data of a run before weights are read, so that errors in the data are found early.

config.model --> model source --> tokenizer --> chat template
                                                    |
config.data  --> files or rows in memory -----------+--> tokenized rows, mapped from the token cache
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.dev_sets import dev_sets
from paddlenlp_ext.data.audit.checks.tokens import CONTEXT_REMEDY
from paddlenlp_ext.data.audit.max_lost_targets import check_losses
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.preference.pair_dataset import load_preference_dataset, load_reward_dataset
from paddlenlp_ext.data.readers.held_out import describe_ratio
from paddlenlp_ext.data.readers.in_memory import Rows
from paddlenlp_ext.data.rollouts.prompt_dataset import StoredRollouts, load_policy_rows
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.load import load_training_template
from paddlenlp_ext.data.tokenization.cache_key import tokenizer_fingerprint
from paddlenlp_ext.data.training_rows import TrainingRows, load_rows
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.trainer.added_tokens import extend_vocabulary
from paddlenlp_ext.trainer.distillation.teacher import teacher_context
from paddlenlp_ext.trainer.policy.dynamic_sampling import drop_stored_without_gradient
from paddlenlp_ext.utils.json_reader import IN_MEMORY
from paddlenlp_ext.utils.logging import get_logger

Dataset = str | os.PathLike[str] | Rows
"""Path of data files, or rows in memory."""


@dataclass(frozen=True)
class RunData:
    """Inputs of a run that are loaded before the weights: model source, tokenizer, chat template and rows.

    Attributes:
        source: the resolved model.
        tokenizer: a Hugging Face tokenizer.
        template: the chat template.
        train_rows: tokenized training rows; None if the run does not train.
        eval_rows: tokenized rows of the dev set, or a mapping from names to dev sets; None without evaluation.
        test_rows: tokenized rows of the test split; None without `do_predict`.
    """

    source: ModelSource
    tokenizer: Any
    template: Any
    train_rows: TrainingRows | None
    eval_rows: TokenizedDataset | Mapping[str, TokenizedDataset] | None
    test_rows: TokenizedDataset | None = None

    @property
    def max_context(self) -> int:
        """Context of the model in positions, after RoPE scaling."""
        return self.source.decoder_config().max_context

    @property
    def any_rows(self) -> TrainingRows:
        """Training rows; if the run does not train, the rows of the first dev set or the test split."""
        rows = next((rows for rows in (self.train_rows, self.eval_rows, self.test_rows) if rows is not None), None)
        assert rows is not None, "validation requires do_train, do_eval or do_predict"
        return next(iter(rows.values())) if isinstance(rows, Mapping) else rows


def rows_in_memory(dataset: Dataset | Mapping[str, Dataset] | None) -> Any:
    """Return datasets in memory unchanged; return None for paths, because the configuration of the run names paths.

    Raises:
        ValueError: some dev sets are rows, and others are paths.
    """
    are_paths = {_is_path(each) for each in (dataset.values() if isinstance(dataset, Mapping) else (dataset,))}
    if len(are_paths) > 1:
        raise ValueError(
            "eval_dataset: some dev sets are paths, others are rows in memory; pass only paths or only rows"
        )
    return None if True in are_paths else dataset


def dataset_keys(train_dataset: Dataset | None, eval_dataset: Dataset | Mapping[str, Dataset] | None) -> dict[str, Any]:
    """Return the configuration keys of a run that trains and evaluates on the given datasets."""
    keys: dict[str, Any] = {"do_train": train_dataset is not None, "do_eval": eval_dataset is not None}
    if train_dataset is not None:
        keys["dataset_name_or_path"] = _path_of(train_dataset)
    if eval_dataset is not None:
        is_named = isinstance(eval_dataset, Mapping)
        named = {name: _path_of(each) for name, each in eval_dataset.items()} if is_named else _path_of(eval_dataset)
        keys["eval_dataset_path"] = named
    return keys


def _is_path(dataset: Any) -> bool:
    """Return whether a dataset is a path or a list of paths."""
    listed = dataset if isinstance(dataset, list | tuple) and dataset else (dataset,)
    return all(isinstance(each, str | os.PathLike) for each in listed)


def _path_of(dataset: Any) -> Any:
    if not _is_path(dataset):
        return IN_MEMORY
    return list(map(os.fspath, dataset)) if isinstance(dataset, list | tuple) else os.fspath(dataset)


def rows_by_dev_set(eval_rows: Any) -> Mapping[str, Rows]:
    """Return the rows in memory of each dev set; a single dev set has the name ""."""
    return eval_rows if isinstance(eval_rows, Mapping) else {"": eval_rows}


def load_data(
    config: RunConfig,
    train_rows: Rows | None = None,
    eval_rows: Rows | Mapping[str, Rows] | None = None,
    tokenizer: Any = None,
) -> RunData:
    """Resolve the model, load tokenizer and chat template, and tokenize the splits that the run uses.

    Args:
        config: configuration of the run.
        train_rows: rows in memory that replace the training dataset of the configuration.
        eval_rows: rows in memory that replace the dev set, or a mapping from names to the rows of several dev sets.
        tokenizer: see `load_tokenizing`.

    Raises:
        ValueError: the model, the template or a dataset is not found, the model family is unsupported, or a row is
            invalid.
    """
    data = load_tokenizing(config, tokenizer)
    train, dev, test = load_splits(config, data.tokenizer, data.template, train_rows, eval_rows)
    return replace(data, train_rows=train, eval_rows=dev, test_rows=test)


def load_splits(
    config: RunConfig,
    tokenizer: Any,
    template: ChatTemplate,
    train_rows: Rows | None = None,
    eval_rows: Rows | Mapping[str, Rows] | None = None,
) -> tuple[TrainingRows | None, TokenizedDataset | Mapping[str, TokenizedDataset] | None, TokenizedDataset | None]:
    """Tokenize the training rows, the dev sets and the test split of a run; see `load_data` for the arguments.

    Returns:
        `train_rows`, `eval_rows` and `test_rows` of `RunData`.
    """
    load = _row_loader(config, tokenizer, template)
    train: Any = load(config.data, split="train", rows=train_rows) if config.train.do_train else None
    if isinstance(train, StoredRollouts) and config.grpo is not None and config.grpo.dynamic_sampling:
        train = drop_stored_without_gradient(train)
    dev = _load_dev_sets(config, load, train_rows, eval_rows) if config.train.do_eval else None
    test = load(config.data, split="test") if config.train.do_predict else None
    return train, dev, test


def _load_dev_sets(
    config: RunConfig,
    load: Callable[..., Any],
    train_rows: Rows | None,
    eval_rows: Rows | Mapping[str, Rows] | None,
) -> TokenizedDataset | Mapping[str, TokenizedDataset]:
    """Tokenize the dev sets with a function from `_row_loader`; return a single unnamed dev set itself."""
    eval_rows = train_rows if config.data.dev_ratio else eval_rows
    if eval_rows is None:
        sections = {
            name: replace(config.data, dataset_name_or_path=path) for name, path in dev_sets(config.data).items()
        }
        sets = {name: load(section, split="dev") for name, section in sections.items()}
    else:
        sets = {name: load(config.data, split="dev", rows=rows) for name, rows in rows_by_dev_set(eval_rows).items()}
    return sets.get("", sets)  # the name of a single dev set is ""


def load_tokenizing(config: RunConfig, tokenizer: Any = None) -> RunData:
    """Resolve the model, and load tokenizer and chat template. The result has no rows.

    Args:
        config: configuration of the run.
        tokenizer: a Hugging Face tokenizer; None: the tokenizer of the model, or of `tokenizer_name_or_path`.

    Raises:
        ValueError: the model or the template is not found, or the model family is unsupported.
    """
    source = ModelSource.from_config(config.model)
    source.decoder_config()  # fails early for an unsupported family
    tokenizer = load_tokenizer(source.tokenizer_path) if tokenizer is None else tokenizer
    source = extend_vocabulary(source, tokenizer, config.model)
    if config.reward is not None:
        # transformers does not score padding tokens. As in TRL, the tokenizer defines the padding token.
        unscored = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        source = source.as_classifier(config.train.seed, unscored)
    template = load_training_template(config.data, tokenizer)
    return RunData(source, tokenizer, template, None, None)


def _row_loader(config: RunConfig, tokenizer: Any, template: ChatTemplate) -> Callable[..., Any]:
    """Return the function that tokenizes a split for the objective of the run.

    The function takes the data section of the run, `split="train"`, `"dev"` or `"test"`, and optionally `rows` in
    memory that replace the dataset of the data section.
    """
    load: Callable[..., Any] = load_rows
    if config.grpo is not None:
        load = load_policy_rows
    elif config.reward is not None:
        load = partial(load_reward_dataset, reward=config.reward)
    elif config.preference is not None:
        load = partial(load_preference_dataset, preference=config.preference)
    return partial(load, tokenizer=tokenizer, template=template, fingerprint=tokenizer_fingerprint(tokenizer))


def check_training_rows(
    config: RunConfig,
    train_rows: TrainingRows | None,
    eval_rows: TokenizedDataset | Mapping[str, TokenizedDataset] | None,
    max_context: int,
) -> None:
    """Check how many target tokens truncation removes, and warn about rows beyond the model's or the teacher's context.

    The log states how many rows `dev_ratio` holds out. The target tokens of a stream are checked later, while its rows
    are read.

    Args:
        config: configuration of the run.
        train_rows, eval_rows: rows of the run; see `RunData`.
        max_context: context of the model in positions, after RoPE scaling.

    Raises:
        ValueError: the fraction of removed target tokens exceeds `max_lost_targets`, or the teacher does not exist.
    """
    if config.data.dev_ratio and train_rows is not None and isinstance(eval_rows, TokenizedDataset):
        _log_held_out(config.data.dev_ratio, eval_rows, train_rows)
    if train_rows is not None and not isinstance(train_rows, TokenStream):
        check_losses(train_rows.stats, config.data.max_lost_targets)
    for warning in context_warnings(config, train_rows, max_context):
        get_logger().warning("%s", warning)


def _log_held_out(ratio: float, dev: TokenizedDataset, train: TrainingRows) -> None:
    """Log how many training rows `dev_ratio` holds out; for a stream, omit the total number of rows."""
    held_out = dev.stats.num_read
    total = "" if isinstance(train, TokenStream) else f" of {held_out + train.stats.num_read:,}"
    message = "dev_ratio %s: %s%s rows are held out for evaluation"
    get_logger().info(message, describe_ratio(ratio), f"{held_out:,}", total)


def context_warnings(config: RunConfig, train_rows: TrainingRows | None, max_context: int) -> list[str]:
    """Return warnings about training rows longer than the context of the model or of its teacher.

    Args:
        config, train_rows, max_context: see `check_training_rows`.

    Raises:
        ValueError: the teacher does not exist.
    """
    warnings = [_rows_beyond_context(config, train_rows, max_context, "model", CONTEXT_REMEDY)]
    if config.distillation is not None and config.distillation.teacher_model_name_or_path is not None:
        context, remedy = teacher_context(config.distillation), "lower max_length, or choose another teacher"
        warnings.append(_rows_beyond_context(config, train_rows, context, "teacher", remedy))
    return [warning for warning in warnings if warning is not None]


def _rows_beyond_context(
    config: RunConfig, train_rows: TrainingRows | None, max_context: int, role: str, remedy: str
) -> str | None:
    """Return a warning about training rows longer than a context.

    Args:
        config: configuration of the run.
        train_rows: training rows; None: the run does not train.
        max_context: context in positions, after RoPE scaling.
        role: model that has this context, "model" or "teacher".
        remedy: end of the warning.

    Returns:
        A warning with the number of longer rows; for a stream, a warning that `max_length` exceeds the context. None if
        no row is longer, `max_length` does not exceed the context, or the run does not train.
    """
    if train_rows is None:
        return None
    if isinstance(train_rows, TokenStream):
        exceeds = config.data.max_length - 1 > max_context
        longer = f"max_length {config.data.max_length:,} exceeds" if exceeds else None
    else:
        count = int((train_rows.sequence_lengths > max_context).sum())
        longer = f"{count:,} of {len(train_rows):,} training rows are longer than" if count else None
    return longer and f"{longer} the {role}'s context of {max_context:,} positions; {remedy}"
