"""Program llm/predict/reward_predictor.py: score the answers in a data file with a reward model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from paddlenlp_ext.cli.predict_file import check_output_file
from paddlenlp_ext.config.command_line import parse_arguments
from paddlenlp_ext.config.dataclass_options import option, options_of
from paddlenlp_ext.data.readers.dataset_files import read_rows
from paddlenlp_ext.data.rows.source_row import InvalidRow
from paddlenlp_ext.inference.arguments import ModelArguments
from paddlenlp_ext.inference.choose_chat_template import choose_template
from paddlenlp_ext.inference.load_model import find_model_and_adapter, load_tokenizer
from paddlenlp_ext.inference.load_reward_model import load_reward_model
from paddlenlp_ext.trainer.score_answers import score_rows
from paddlenlp_ext.utils.files import write_text
from paddlenlp_ext.utils.logging import get_logger

USAGE = "reward_predictor.py --model_name_or_path MODEL --data_file ROWS [--key value ...]\n\nScore answers."
logger = get_logger("paddlenlp_ext.predict")


@dataclass(frozen=True, kw_only=True)
class RewardPredictorArguments(ModelArguments):
    """Arguments of reward_predictor.py."""

    data_file: str = option(
        MISSING, aliases=("data",), help="rows in a preference or fine-tuning format, one JSON object per line"
    )
    output_file: str = option(
        "rewards.jsonl",
        aliases=("out",),
        help='output file: the rows with an added field "rewards", the reward of the chosen answer first',
    )
    max_length: int = option(
        4096, minimum=2, aliases=("max_total_length",), help="maximum number of tokens in a prompt with all its answers"
    )
    batch_size: int = option(8, minimum=1, help="number of rows scored together")


def reward_predictor(argv: Sequence[str]) -> None:
    """Write each row of a file with the rewards of its answers.

    Args:
        argv: the command line without the program's name.

    Raises:
        ValueError: a model, adapter, template or file cannot be used, or rows are invalid or too long.
    """
    values, _ = parse_arguments(argv, options_of(RewardPredictorArguments, "arguments"), USAGE)
    arguments = RewardPredictorArguments(**values)
    check_output_file(arguments.output_file, arguments.data_file)
    data_file = Path(arguments.data_file).expanduser()
    if not data_file.is_file():
        raise ValueError(f"data_file: {arguments.data_file!r} is not a file; pass a file with one JSON object per line")
    rows = list(read_rows(data_file))
    base, adapter = find_model_and_adapter(arguments)
    tokenizer = load_tokenizer(base, adapter)
    template = choose_template(arguments, [adapter, base], tokenizer)
    model = load_reward_model(arguments, base, adapter)
    rewards = score_rows(model, template, rows, max_length=arguments.max_length, batch_size=arguments.batch_size)
    read = (row.value for row in rows if not isinstance(row, InvalidRow))
    lines = [json.dumps({**row, "rewards": own}, ensure_ascii=False) for row, own in zip(read, rewards, strict=True)]
    output_file = Path(arguments.output_file).expanduser()
    output_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(output_file, "".join(f"{line}\n" for line in lines))
    logger.info("rewards of %d rows written to %s", len(lines), output_file)
