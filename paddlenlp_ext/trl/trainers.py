"""Trainers with TRL's interface, for the same runs as the programs in `llm/`.

arguments (SFTConfig, ...) --> keys of a run --> RunConfig --+
rows, or a path ---------------------------------------------+--> Trainer --> train, evaluate, save_model
model, or its name ------------------------------------------+
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from paddle import nn

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.config.run_config import method_options, switches_of
from paddlenlp_ext.data.templates.load import load_training_template
from paddlenlp_ext.devices import choose_device
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.sequence_classifier import SequenceClassifier
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.parallel.gloo import connect_processes
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.rewards.registry import RewardFunction
from paddlenlp_ext.trainer.build_model import BuiltModel, adapt_model
from paddlenlp_ext.trainer.build_trainer import build_trainer, build_trainer_of
from paddlenlp_ext.trainer.hub import check_push
from paddlenlp_ext.trainer.import_dotted_paths import import_dotted_paths
from paddlenlp_ext.trainer.load_data import check_training_rows, dataset_keys, load_data, load_splits, rows_in_memory
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.trl.arguments import DPOConfig, GRPOConfig, RewardConfig, SFTConfig, TrainingArguments
from paddlenlp_ext.trl.text_rows import text_reader, text_rows
from paddlenlp_ext.utils.distributed_env import world_size
from paddlenlp_ext.utils.json_reader import IN_MEMORY

Model = CausalLM | PeftModel


class TrainOutput(NamedTuple):
    """Result of training: optimizer steps, mean loss, and the contents of train_results.json."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class _TaskTrainer:
    """Base class of the trainers; a subclass sets `args_class`.

    Attributes:
        model: the model, with its adapter.
        args: the arguments.
        processing_class: the tokenizer.
        trainer: the `Trainer` of the run.
    """

    args_class: ClassVar[type[TrainingArguments]]

    def _build(
        self,
        model: Model | str | os.PathLike[str],
        args: TrainingArguments | None,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        callbacks: Iterable[Any] | None,
        peft_config: PeftConfig | None,
        run_keys: Mapping[str, Any],
        reward_functions: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        """Build the `Trainer` of the run from the arguments of the subclass's constructor and additional `run_keys`."""
        started = time.monotonic()
        name = os.fspath(model) if isinstance(model, str | os.PathLike) else model.config.name_or_path
        self.args = args or self.args_class(f"{os.path.basename(name or 'model')}-{self.args_class.task}")
        adapter = model.peft_config if isinstance(model, PeftModel) else peft_config
        if isinstance(model, PeftModel) and peft_config is not None:
            raise ValueError("peft_config: the model has an adapter already; pass the base model, or no peft_config")
        keys = {"model_name_or_path": name or IN_MEMORY, **self.args.to_run_keys(), **run_keys}
        keys |= dataset_keys(train_dataset, eval_dataset)
        tokenizer_name = keys.get("tokenizer_name_or_path")
        if processing_class is not None and tokenizer_name is not None:
            raise ValueError("processing_class and tokenizer_name_or_path both select the tokenizer; pass one of them")
        config = _with_adapter(keys, self.args.sections, adapter)
        check_push(config.train)
        import_dotted_paths(config, reward_functions)
        train_rows, eval_rows = rows_in_memory(train_dataset), rows_in_memory(eval_dataset)
        connect_processes(config.precision.device)
        if isinstance(model, str | os.PathLike):
            data = load_data(config, train_rows, eval_rows, processing_class)
            check_training_rows(config, data.train_rows, data.eval_rows, data.max_context)
            self.processing_class = data.tokenizer
            self.trainer = build_trainer(config, data, callbacks or (), reward_functions)
        else:
            self.processing_class = _tokenizer_for(tokenizer_name or name, processing_class)
            self.trainer = self._around(model, config, train_rows, eval_rows, callbacks or (), reward_functions)
        self.trainer.started = started

    def _around(
        self,
        model: Model,
        config: RunConfig,
        train_rows: Any,
        eval_rows: Any,
        callbacks: Iterable[Any],
        reward_functions: Mapping[str, RewardFunction] | None,
    ) -> Trainer:
        """Build the `Trainer` of a model in memory."""
        if world_size() > 1:
            raise ValueError(
                "model: a run with several processes loads and shards the model itself; pass the name of the model"
            )
        if config.reward is not None and model.task_type != SequenceClassifier.task_type:
            raise ValueError(
                "model: this model has no score head; load it with AutoModelForSequenceClassification, or pass its name"
            )
        choose_device(config.precision.device)
        tokenizer = self.processing_class
        template = load_training_template(config.data, tokenizer)
        rows, dev, _ = load_splits(config, tokenizer, template, train_rows, eval_rows)
        check_training_rows(config, rows, dev, model.config.max_context)
        adapted = model if isinstance(model, PeftModel) else adapt_model(model, config)
        adapted.add_eos_token_ids({*template.stop_token_ids, tokenizer.eos_token_id} - {None})
        return build_trainer_of(
            BuiltModel(adapted), config, rows, dev, tokenizer, callbacks=callbacks, reward_functions=reward_functions
        )

    @property
    def model(self) -> TrainableModel:
        """The model, with its adapter."""
        return self.trainer.model

    @property
    def state(self) -> TrainerState:
        """Progress of the run, with its log history."""
        return self.trainer.state

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train, or resume from a checkpoint; with `push_to_hub`, upload the model afterwards.

        Args:
            resume_from_checkpoint: path of a checkpoint; True: the newest checkpoint in `output_dir`; None:
                `resume_from_checkpoint` of `args.run_keys`, by default a new run.

        Raises:
            ValueError: `train_dataset` is not set, or the output folder, checkpoint or configuration is invalid.
        """
        if self.trainer.train_rows is None:
            raise ValueError("train_dataset: not set; pass rows or a path to train on")
        if resume_from_checkpoint is not None:
            train = dataclasses.replace(self.trainer.config.train, resume_from_checkpoint=resume_from_checkpoint)
            self.trainer.config = dataclasses.replace(self.trainer.config, train=train)
        metrics = self.trainer.train()
        return TrainOutput(self.state.step, metrics["train_loss"], metrics)

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the eval rows, and return the metrics."""
        return self.trainer.evaluate()

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the model or its adapter, and the tokenizer, to `output_dir`; None: the folder in `args.output_dir`."""
        self.trainer.save_model(None if output_dir is None else os.fspath(output_dir))

    def push_to_hub(self) -> str | None:
        """Write the model or adapter and upload it with its results; see `Trainer.push_to_hub`."""
        return self.trainer.push_to_hub()

    def add_callback(self, callback: Any) -> None:
        """Add a `TrainerCallback` or `Callback`; see `Trainer.add_callback`."""
        self.trainer.add_callback(callback)


class SFTTrainer(_TaskTrainer):
    """Trainer of supervised fine-tuning, with TRL's interface.

    Args:
        model: a model, or a name for `AutoModelForCausalLM.from_pretrained`.
        args: arguments; None: TRL's defaults, with an output folder named after the model.
        train_dataset: rows as a list of dicts, a `datasets.Dataset` or a path (docs/reference/data_formats.md).
        eval_dataset: evaluation rows in the format of `train_dataset`, or a dict of several eval datasets by name.
        processing_class: tokenizer; None: the tokenizer of the model, or `tokenizer_name_or_path` of `args.run_keys`.
        callbacks: callbacks in addition to the default callbacks.
        peft_config: config of the adapter to train; None: all weights are trained.
        formatting_func: function that maps a row to its text; every token of the text is a target token. Datasets must
            be in memory.

    Raises:
        ValueError: an argument, the model or a row is invalid.

    Examples:
        >>> rows = [{"prompt": "2 + 2?", "completion": "4"}]
        >>> args = SFTConfig("sft-output", max_steps=1)
        >>> trainer = SFTTrainer("smollm2-135m-instruct", args, rows, peft_config=LoraConfig(r=2))
        >>> trainer.train().global_step
        1
    """

    args_class = SFTConfig

    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Iterable[Any] | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        field = (args or SFTConfig()).dataset_text_field
        as_text = text_reader(formatting_func, field, train_dataset, eval_dataset)
        keys = {} if as_text is None else {"autoregressive": True}
        if as_text is not None:
            train_dataset, eval_dataset = text_rows(train_dataset, as_text), text_rows(eval_dataset, as_text)
        self._build(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config, keys)


class DPOTrainer(_TaskTrainer):
    """Trainer of preference training, with TRL's interface; docs/reference/preference.md lists the losses.

    Args:
        model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config: see `SFTTrainer`. Rows are
            pairs of a chosen and a rejected answer, or rated answers.
        ref_model: must be None. The reference model is the model at the start of the run.

    Raises:
        ValueError: an argument, the model or a row is invalid.
    """

    args_class = DPOConfig

    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        ref_model: None = None,
        args: DPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Iterable[Any] | None = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        if ref_model is not None:
            raise ValueError("ref_model: the reference model is the model at the start of the run; remove ref_model")
        self._build(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config, {})


class RewardTrainer(_TaskTrainer):
    """Trainer of a reward model, with TRL's interface.

    Args:
        model: a model from `AutoModelForSequenceClassification`, or a model name. A language model that is loaded by
            name gets a new score head.
        args, train_dataset, eval_dataset, processing_class, callbacks, peft_config: see `SFTTrainer`. Rows are pairs of
            a chosen and a rejected answer.

    Raises:
        ValueError: an argument, the model or a row is invalid.
    """

    args_class = RewardConfig

    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        args: RewardConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Iterable[Any] | None = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        self._build(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config, {})


class GRPOTrainer(_TaskTrainer):
    """Trainer of GRPO on sampled completions, with TRL's interface; docs/grpo.md describes the method.

    Args:
        model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config: see `SFTTrainer`. Rows are
            prompts; their other fields are arguments of the reward functions.
        reward_funcs: a reward function or a list of them: functions with TRL's interface, or names as in the key
            `reward_funcs` (docs/reference/rewards.md).

    Raises:
        ValueError: an argument, the model or a row is invalid, or two reward functions have the same name.
    """

    args_class = GRPOConfig

    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str] = (),
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Iterable[Any] | None = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        named = _named_functions(reward_funcs)
        keys = {"reward_funcs": list(named)} if named else {}
        functions = {name: function for name, function in named.items() if not isinstance(function, str)}
        self._build(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config, keys, functions)


def _named_functions(
    reward_funcs: RewardFunction | str | Sequence[RewardFunction | str],
) -> dict[str, RewardFunction | str]:
    """Return reward functions by their entries in the key `reward_funcs`: a name, or module.function.

    Raises:
        ValueError: an item is neither a function nor a name, or two functions have the same name.
    """
    is_one = isinstance(reward_funcs, str) or callable(reward_funcs)
    listed: Sequence[Any] = (reward_funcs,) if is_one else reward_funcs
    named: dict[str, RewardFunction | str] = {}
    for each in listed:
        if isinstance(each, nn.Layer) or (isinstance(each, str) and "/" in each and ".py:" not in each):
            named_model = each if isinstance(each, str) else type(each).__name__
            raise ValueError(
                f'reward_funcs: {named_model} is a model; pass "reward_model", and the folder of the model in '
                "run_keys={'reward_model_name_or_path': FOLDER}"
            )
        if not isinstance(each, str) and not callable(each):
            raise ValueError(f"reward_funcs: {each!r:.60} is not a function or the name of one; pass a function")
        name = each if isinstance(each, str) else f"{each.__module__}.{getattr(each, '__name__', type(each).__name__)}"
        if name in named:
            raise ValueError(f"reward_funcs: two functions have the name {name}; rename one of them")
        named[name] = each
    return named


def _with_adapter(keys: dict[str, Any], sections: Mapping[str, type], adapter: PeftConfig | None) -> RunConfig:
    """Return the checked configuration of a run with the adapter config `adapter`."""
    methods = peft_methods()
    switch = next((name for name, method in methods.items() if method is type(adapter)), None)
    if adapter is None:
        return run_config_from(keys, {}, methods, sections)
    if switch is None:
        raise ValueError(
            f"peft_config: {type(adapter).__name__} is not the config of an adapter method; pass, for example, a "
            "LoraConfig"
        )
    keys = {**keys, **dict.fromkeys(switches_of(switch, type(adapter)), True)}
    keys |= {
        option.key: value
        for option in method_options(switch, type(adapter))
        if (value := getattr(adapter, option.attribute)) is not None
    }
    return dataclasses.replace(run_config_from(keys, {}, methods, sections), peft=adapter)


def _tokenizer_for(name: str | None, tokenizer: Any) -> Any:
    """Return `tokenizer`; if it is None, load the tokenizer of the model `name`."""
    if tokenizer is not None:
        return tokenizer
    if not name:
        raise ValueError(
            "processing_class: not set, and the model has no name to load a tokenizer from; pass a tokenizer"
        )
    return load_tokenizer(name)
