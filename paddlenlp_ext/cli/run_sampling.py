"""Program llm/run_sampling.py: sample answers to prompts, score them, and write training rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from paddlenlp_ext.cli.predict_file import check_output_file
from paddlenlp_ext.cli.predict_resume import IncompleteFile, digest, files_state
from paddlenlp_ext.cli.progress import progress
from paddlenlp_ext.cli.sampled_rows import training_rows
from paddlenlp_ext.cli.sampling_arguments import ROLLOUTS, SamplingArguments
from paddlenlp_ext.config.sections.generation import GenerationConfig
from paddlenlp_ext.config.sections.preference import PreferenceDataConfig
from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.data.rollouts.prompt_dataset import PromptDataset, load_prompts
from paddlenlp_ext.data.rollouts.rollout import Rollout, read_rollouts, rollout_line
from paddlenlp_ext.inference.choose_chat_template import choose_template
from paddlenlp_ext.inference.load_model import find_model_and_adapter, load_model, load_tokenizer
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.rewards.load_rewards import Reward, load_rewards
from paddlenlp_ext.trainer.evaluate import evaluation_mode
from paddlenlp_ext.trainer.policy.sample_completions import sample_completions
from paddlenlp_ext.trainer.policy.scored_rollouts import scored_rollouts
from paddlenlp_ext.utils.files import sole_writer, write_text
from paddlenlp_ext.utils.import_by_path import source_file
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.storage_errors import explained_errors

_BATCHES_PER_PART = 4
"""Size of a part, in multiples of `batch_size`. The answers to the prompts of a part are written together."""
_SELECTION = frozenset(("output_file", "output_format", "keep", "min_reward", "min_margin"))
"""Arguments that the answers and their rewards do not depend on."""

logger = get_logger("paddlenlp_ext.predict")


def run_sampling(arguments: SamplingArguments, rewards_config: RewardsConfig) -> None:
    """Write rows with sampled answers, and print a table of the rewards.

    Answers are written to `.NAME.incomplete` beside the output file NAME. An interrupted run continues after the last
    finished prompt.

    Raises:
        ValueError: a model, template, file or reward function cannot be used, or a reward function fails.
    """
    check_output_file(arguments.output_file, arguments.data_file)
    if not Path(arguments.data_file).expanduser().exists():
        raise ValueError(
            f"data_file: {arguments.data_file!r} does not exist; pass a file with one JSON object per line"
        )
    base, adapter = find_model_and_adapter(arguments)
    tokenizer = load_tokenizer(base, adapter)
    template = choose_template(arguments, [adapter, base], tokenizer)
    data = PreferenceDataConfig(dataset_name_or_path=arguments.data_file, src_length=arguments.src_length)
    prompts = load_prompts(data, "train", tokenizer, template)
    draft = IncompleteFile(arguments.output_file, _inputs(arguments, rewards_config, base, adapter, prompts))
    draft.check()
    rewards = load_rewards(rewards_config)
    model = load_model(arguments, base, adapter)
    model.add_eos_token_ids({*template.stop_token_ids, tokenizer.eos_token_id} - {None})
    output = Path(arguments.output_file).expanduser()
    with explained_errors(arguments.output_file), sole_writer(output):
        _sample(arguments, model, prompts, rewards, draft)
        rollouts = read_rollouts(draft.path)
        if arguments.output_format == ROLLOUTS:
            draft.complete()
            num_rows = len(rollouts)
        else:
            pairs = zip(prompts.rows, rollouts, strict=True)
            end_tokens = frozenset(model.eos_token_ids)
            groups = [training_rows(arguments, row.prompt, each, end_tokens, prompts.text) for row, each in pairs]
            lines = [json.dumps(row, ensure_ascii=False) for group in groups for row in group]
            write_text(output, "".join(f"{line}\n" for line in lines))
            draft.remove()
            num_rows = len(lines)
    _print_table(rollouts, rewards, frozenset(model.eos_token_ids))
    if not num_rows:
        logger.warning(
            "no answer qualifies, so %s is empty; compare the rewards above with --min_reward or --min_margin, and "
            "raise --max_length if answers are truncated",
            arguments.output_file,
        )
    logger.info("%d rows written to %s", num_rows, arguments.output_file)


def _inputs(
    arguments: SamplingArguments, rewards: RewardsConfig, base: str, adapter: str | None, prompts: PromptDataset
) -> dict[str, Any]:
    """Return all inputs that the answers and rewards depend on; files are compared by size and modification time."""
    folders = [ModelSource.resolve(base).path] + ([] if adapter is None else [Path(adapter).expanduser()])
    code = [file for file in map(source_file, rewards.reward_funcs) if file is not None]
    written = filter(None, (rewards.reward_json_schema, rewards.reward_model_name_or_path))
    files = [*code, *(path for path in (Path(each).expanduser() for each in written) if path.exists())]
    own = {name: value for name, value in asdict(arguments).items() if name not in _SELECTION | {"data_file"}}
    return json.loads(
        json.dumps(
            {
                **own,
                **asdict(rewards),
                "files of the model": [files_state(folder) for folder in folders],
                "files of the rewards": [files_state(file) for file in files],
                "data_file or template": digest([[row.ids, row.value, dict(row.columns)] for row in prompts.rows]),
            }
        )
    )


def _sample(
    arguments: SamplingArguments, model: Any, prompts: PromptDataset, rewards: Sequence[Reward], draft: IncompleteFile
) -> None:
    """Append the scored answers of the prompts that the draft lacks."""
    options = GenerationConfig(
        max_new_tokens=arguments.max_length,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
    )
    count = arguments.num_generations
    size = max(1, _BATCHES_PER_PART * arguments.batch_size // count)
    done, total = draft.begin(), len(prompts)
    with (
        draft.path.open("a", encoding="utf-8") as lines,
        progress(total * count, done * count, "answers") as advance,
        evaluation_mode(model),
    ):
        while done < total:
            indices = range(done, min(total, (done // size + 1) * size))  # the parts of an uninterrupted run
            groups = sample_completions(
                model,
                [(index, prompts.rows[index].ids) for index in indices],
                count,
                options,
                end_tokens=frozenset(model.eos_token_ids),
                max_rows=arguments.batch_size,
                seed=arguments.seed,
                on_completion=lambda completion: advance(len(completion.tokens)),
            )
            lines.write("".join(map(rollout_line, scored_rollouts(rewards, prompts, indices, groups))))
            lines.flush()
            done = indices.stop


def _print_table(rollouts: Sequence[Rollout], rewards: Sequence[Reward], end_tokens: frozenset[int]) -> None:
    """Print the rewards of all answers, and of the best answer of each prompt."""
    table = Table(title="Rewards", title_justify="left")
    for title in (
        "reward",
        "weight",
        "mean",
        "best of each prompt",
        "worst of each prompt",
        "prompts with equal rewards",
    ):
        table.add_column(title, justify="left" if title == "reward" else "right")
    columns = {each.name: (f"{each.weight:g}", [rollout.scores[each.name] for rollout in rollouts]) for each in rewards}
    for name, (weight, groups) in {**columns, "total": ("", [rollout.rewards for rollout in rollouts])}.items():
        known = [group[~np.isnan(group)] for group in groups]
        known = [group for group in known if len(group)]
        if not known:
            table.add_row(name, weight, "", "", "", "")
            continue
        means = [np.concatenate(known).mean(), np.mean([group.max() for group in known])]
        means.append(np.mean([group.min() for group in known]))
        equal = sum(group.max() == group.min() for group in known)
        table.add_row(name, weight, *(f"{mean:.3f}" for mean in means), f"{equal} of {len(known)}")
    console = Console(highlight=False, markup=False)  # names of functions may contain brackets
    console.print(table)
    lengths = np.concatenate([rollout.lengths for rollout in rollouts])
    truncated = np.concatenate([rollout.is_truncated(end_tokens) for rollout in rollouts])
    console.print(
        f"{len(rollouts)} prompts, {len(lengths)} answers of {lengths.mean():.1f} tokens on average, "
        f"{truncated.mean():.1%} truncated"
    )
