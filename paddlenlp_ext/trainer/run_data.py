"""Load the data of a run before any weight, because data fails fastest.

config.model --> model source --> tokenizer --> chat template
                                                    |
config.data  --> files or rows in memory -----------+--> tokenized rows, mapped from the token cache
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.dev_sets import dev_sets
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.preference.pair_dataset import load_preference_dataset, load_reward_dataset
from paddlenlp_ext.data.readers.in_memory import Rows
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.load import load_configured_template
from paddlenlp_ext.data.tokenization.cache_key import tokenizer_fingerprint
from paddlenlp_ext.data.training_rows import TrainingRows, load_rows
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.trainer.added_tokens import extend_vocabulary
from paddlenlp_ext.trainer.metrics.custom_metrics import ComputeMetrics, load_compute_metrics


@dataclass(frozen=True)
class RunData:
    """Inputs of a run that are loaded before any weight: model source, tokenizer, chat template and rows.

    Attributes:
        source: the resolved model.
        tokenizer: a Hugging Face tokenizer.
        template: the chat template.
        train_rows: tokenized training rows; None if the run does not train.
        eval_rows: tokenized rows of the dev set, or a mapping from names to dev sets; None without evaluation.
        compute_metrics: function that the key `compute_metrics` names; None without the key.
    """

    source: ModelSource
    tokenizer: Any
    template: Any
    train_rows: TrainingRows | None
    eval_rows: TokenizedDataset | Mapping[str, TokenizedDataset] | None
    compute_metrics: ComputeMetrics | None = None

    @property
    def any_rows(self) -> TrainingRows:
        """The training rows; without training, the rows of the first dev set."""
        rows = self.train_rows if self.train_rows is not None else self.eval_rows
        assert rows is not None, "validation requires do_train or do_eval"
        return next(iter(rows.values())) if isinstance(rows, Mapping) else rows


def load_data(
    config: RunConfig, train_rows: Rows | None = None, eval_rows: Rows | Mapping[str, Rows] | None = None
) -> RunData:
    """Resolve the model, load tokenizer and chat template, and tokenize the splits that the run uses.

    Args:
        config: configuration of the run.
        train_rows: rows in memory, in place of the training rows that the configuration names.
        eval_rows: rows in memory, in place of the dev set; a mapping has the rows of each dev set by its name.

    Raises:
        ValueError: no such model, template, dataset or `compute_metrics`, an unsupported model family, or invalid rows.
    """
    data = load_tokenizing(config)
    train, dev = load_splits(config, data.tokenizer, data.template, train_rows, eval_rows)
    return replace(data, train_rows=train, eval_rows=dev)


def load_splits(
    config: RunConfig,
    tokenizer: Any,
    template: ChatTemplate,
    train_rows: Rows | None = None,
    eval_rows: Rows | Mapping[str, Rows] | None = None,
) -> tuple[TrainingRows | None, TokenizedDataset | Mapping[str, TokenizedDataset] | None]:
    """Tokenize the splits that a run uses: its training rows and its dev sets; see `load_data`."""
    load = row_loader(config, tokenizer, template)
    train = load(config.data, split="train", rows=train_rows) if config.train.do_train else None
    if not config.train.do_eval:
        return train, None
    if eval_rows is None:
        sections = {
            name: replace(config.data, dataset_name_or_path=path) for name, path in dev_sets(config.data).items()
        }
        sets = {name: load(section, split="dev") for name, section in sections.items()}
    else:
        named = eval_rows if isinstance(eval_rows, Mapping) else {"": eval_rows}
        sets = {name: load(config.data, split="dev", rows=rows) for name, rows in named.items()}
    return train, sets.get("", sets)  # a single dev set has no name


def load_tokenizing(config: RunConfig) -> RunData:
    """Resolve the model, and load tokenizer and chat template; the result has no rows.

    Raises:
        ValueError: no such model, template or `compute_metrics`, or an unsupported model family.
    """
    source = ModelSource.from_config(config.model)
    DecoderConfig.from_dict(source.config)  # an unsupported family is an error before any row is read
    compute_metrics = load_compute_metrics(config.generation.compute_metrics)
    tokenizer = load_tokenizer(source.tokenizer_path)
    source = extend_vocabulary(source, tokenizer, config.model)
    if config.reward is not None:
        # transformers does not score the padding token, which as in TRL is the padding token of the tokenizer.
        unscored = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        source = source.as_classifier(config.train.seed, unscored)
    template = load_configured_template(config.data, tokenizer)
    return RunData(source, tokenizer, template, None, None, compute_metrics)


def row_loader(config: RunConfig, tokenizer: Any, template: ChatTemplate) -> Callable[..., Any]:
    """Return the function that tokenizes a split, of answers, scored pairs or preference pairs.

    Its arguments are the data section of the run, `split="train"` or `"dev"`, and optionally `rows` in memory, which
    replace the dataset of the section.
    """
    load: Callable[..., Any] = load_rows
    if config.reward is not None:
        load = partial(load_reward_dataset, reward=config.reward)
    elif config.preference is not None:
        load = partial(load_preference_dataset, preference=config.preference)
    return partial(load, tokenizer=tokenizer, template=template, fingerprint=tokenizer_fingerprint(tokenizer))
