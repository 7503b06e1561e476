"""Commands that use a trained model: chat, predict, sample, merge, export, quantize, eval and serve.

A command takes the output_dir of a run as its first argument, finds the model and adapter there, and runs the program
of llm/ for the same task.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext._runtime import require_paddle
from paddlenlp_ext.cli.run_folder import RunFolder, find_run, is_model_name, newest_run
from paddlenlp_ext.commands.arguments import names, take_first, wants_all_keys, wants_help, with_long_names
from paddlenlp_ext.config.config_files import FILE_SUFFIXES
from paddlenlp_ext.config.help_text import print_help, read_keys
from paddlenlp_ext.utils.logging import get_logger

_RUN = """  RUN                           output_dir of a training run, or a folder with a model or adapter
  -m, --model                   model to use instead of RUN
  -a, --adapter                 adapter of the model"""
_ROWS = "  -d, --data                    rows, one JSON object per line"
_NEW_TOKENS = "  --max-new-tokens              maximum number of new tokens in an answer"
_OUT = "  -o, --out                     "

_USAGES = {
    "chat": f"""[RUN] [--key value ...]

Chat in the terminal. Without RUN, the only run in ./checkpoints is used.

{_RUN}
{_NEW_TOKENS}""",
    "predict": f"""RUN [-d ROWS] [-o ANSWERS] [--key value ...]

Answer a file of rows, or score it with a reward model. The default of --data is the eval rows
of the run.

{_RUN}
{_ROWS}
{_OUT}file of the answers; default: output.json
{_NEW_TOKENS}""",
    "sample": f"""RUN -d PROMPTS --reward_funcs NAME,... [-o ROWS] [--key value ...]

Sample several answers to each prompt, score them with reward functions, and write rows for
pnx sft, pnx dpo or pnx grpo (docs/reference/rewards.md).

{_RUN}
{_ROWS}
{_OUT}file of the rows; default: samples.jsonl
{_NEW_TOKENS}""",
    "merge": f"""RUN [-o FOLDER] [--key value ...]

Merge an adapter into its base model.

{_RUN}
{_OUT}folder of the merged model; default: RUN-merged""",
    "export gguf": f"""RUN [-o FILE.gguf] [--key value ...]

Write a model for llama.cpp and Ollama: weights, tokenizer and chat template in one file, and an
Ollama Modelfile.

{_RUN}
{_OUT}file to write; default: RUN.gguf""",
    "export static": f"""RUN [-o FOLDER] [--key value ...]

Write a static graph for paddle.inference, with the adapter merged into the model.

{_RUN}
{_OUT}folder of the exported model; default: RUN-static""",
    "quantize": f"""MODEL -o FOLDER [FILE ...] [--key value ...]

Quantize a model for serving. The default method rounds to nearest (do_ptq).

  MODEL                         folder of a merged or fully trained model
{_OUT}folder of the quantized model""",
    "eval": f"""RUN [--tasks TASK.json,... | --task KIND -d ROWS] [--key value ...]

Score a model, or compare it with its adapter, the merged model and other models. Without a task,
answers to the eval rows of the run are scored; without eval rows, answers to built-in questions.

{_RUN}
{_ROWS}
{_OUT}folder of the report; default: RUN-evaluation""",
    "serve": f"""RUN [--key value ...]

Serve OpenAI's API: /v1/models, /v1/chat/completions, /v1/completions; and /health.

{_RUN}""",
}


def _usage(command: str) -> str:
    return f"pnx {command} {_USAGES[command]}"


def chat(argv: Sequence[str]) -> None:
    """Chat in the terminal.

    Raises:
        ValueError: no model is named and ./checkpoints does not have exactly one run, the model is a reward model, or
            `--data` is set.
    """
    from paddlenlp_ext.cli.predict_arguments import parse_arguments

    words, run = _model_words(argv, finds_newest=True)
    if names(words, "data", "data_file"):
        raise ValueError("pnx chat answers messages that are typed; to answer a file of rows, use pnx predict")
    if run is not None and run.is_reward_model:
        raise ValueError(f"{run.path} is a reward model, which scores answers; use pnx predict {run.path} -d ROWS")
    arguments = parse_arguments(words, _usage("chat"))
    require_paddle()
    from paddlenlp_ext.cli.predict import predict as answer

    answer(arguments)


def predict(argv: Sequence[str]) -> None:
    """Generate an answer for each row of a file, or a score for each row if the model is a reward model.

    Raises:
        ValueError: no rows are given, and the run has no eval rows.
    """
    from paddlenlp_ext.cli.predict_arguments import parse_arguments

    words, run = _model_words(argv)
    if run is not None and not names(words, "data", "data_file"):
        words += _eval_rows(run)
    if run is not None and run.is_reward_model:
        require_paddle()
        from paddlenlp_ext.cli.reward_predictor import reward_predictor

        return reward_predictor(words)
    arguments = parse_arguments(words, _usage("predict"))
    if arguments.data_file is None:
        raise ValueError("no rows to answer; pass --data ROWS.jsonl, a file with one JSON object per line")
    require_paddle()
    from paddlenlp_ext.cli.predict import predict as answer

    answer(arguments)


def sample(argv: Sequence[str]) -> None:
    """Sample answers, score them with reward functions, and write training rows."""
    from paddlenlp_ext.cli.sampling_arguments import parse_arguments

    words, _ = _model_words(argv)
    arguments, rewards = parse_arguments(words, _usage("sample"))
    require_paddle()
    from paddlenlp_ext.cli.run_sampling import run_sampling

    run_sampling(arguments, rewards)


def merge(argv: Sequence[str]) -> None:
    """Merge an adapter into its base model.

    Raises:
        ValueError: the run has no adapter.
    """
    from paddlenlp_ext.cli.merge_peft_params import merge_arguments, run_merge

    folder, rest = take_first(with_long_names(argv))
    if folder is not None:
        run = find_run(folder)
        if run.adapter is None:
            raise ValueError(f"{folder} has a full model and no adapter, so there is nothing to merge")
        base = [] if run.base is None or names(rest, "model", "model_name_or_path") else ["--model", run.base]
        rest = [*base, *rest, *_default_out(rest, run, "-merged"), "--adapter", str(run.weights)]
    print(run_merge(merge_arguments(rest, None, "--peft_path", usage=_usage("merge"))))


def export_gguf(argv: Sequence[str]) -> None:
    """Write a GGUF file for llama.cpp and Ollama."""
    from paddlenlp_ext.cli.export_gguf import export_arguments, run_export

    words, _ = _model_words(argv, suffix=".gguf")
    print(run_export(export_arguments(words, _usage("export gguf"))))


def export_static(argv: Sequence[str]) -> None:
    """Write a static graph for paddle.inference."""
    from paddlenlp_ext.cli.export_model_arguments import parse_arguments

    words, _ = _model_words(argv, suffix="-static")
    arguments = parse_arguments(words, _usage("export static"))
    require_paddle()
    from paddlenlp_ext.cli.export_model import export_model

    print(export_model(arguments))


def quantize(argv: Sequence[str]) -> None:
    """Quantize a trained model.

    Raises:
        ValueError: the folder has an adapter that is not merged.
    """
    if wants_help(argv):
        print_help(read_keys("quantize"), _usage("quantize"), wants_all_keys(argv))
    folder, rest = take_first(with_long_names(argv))
    if folder is not None and not folder.endswith(FILE_SUFFIXES):
        if not is_model_name(folder):
            run = find_run(folder)
            if run.adapter is not None:
                raise ValueError(f"{folder} has an adapter; merge it first: pnx merge {folder} -o {folder}-merged")
            folder = str(run.weights)
        rest = ["--model", folder, "--do_ptq", "true", *rest]
    elif folder is not None:
        rest = [folder, *rest]
    require_paddle()
    from paddlenlp_ext.cli.run_quantization import run_quantization

    run_quantization(rest)


def evaluate(argv: Sequence[str]) -> None:
    """Score a model on tasks."""
    from paddlenlp_ext.evaluation.arguments import parse_arguments

    words, run = _model_words(argv, suffix="-evaluation")
    if run is not None and not names(words, "tasks", "task"):
        words += [] if names(words, "data", "data_file") else _eval_rows(run)
        words += ["--task", "generation"] if names(words, "data", "data_file") else ["--tasks", "general"]
    arguments, tasks = parse_arguments(words, _usage("eval"))
    require_paddle()
    from paddlenlp_ext.cli.run_evaluation import run_evaluation

    run_evaluation(arguments, tasks)


def serve(argv: Sequence[str]) -> None:
    """Serve a model with OpenAI's API."""
    from paddlenlp_ext.serve.arguments import parse_arguments

    words, _ = _model_words(argv)
    arguments = parse_arguments(words, _usage("serve"))
    require_paddle()
    from paddlenlp_ext.serve.server import serve as run_server

    run_server(arguments)


def _model_words(
    argv: Sequence[str], suffix: str | None = None, finds_newest: bool = False
) -> tuple[list[str], RunFolder | None]:
    """Return the command line of the program, with the model as `--model`, and the run or None.

    Args:
        argv: the command line after the command.
        suffix: text after the run's folder in the default of `--out`; None: no default.
        finds_newest: whether to use the only run in ./checkpoints if the command line names no model.
    """
    first, rest = take_first(with_long_names(argv))
    if wants_help(argv):
        return rest, None
    if first is None and (names(rest, "model", "model_name_or_path") or not finds_newest):
        return rest, None
    if first is not None and is_model_name(first):
        return ["--model", first, *rest], None
    run = newest_run() if first is None else find_run(first)
    if run.weights != run.path:
        get_logger().info("%s has no final model yet; using %s", run.path, run.weights)
    return ["--model", str(run.weights), *rest, *_default_out(rest, run, suffix)], run


def _eval_rows(run: RunFolder) -> list[str]:
    """Return `--data` with the eval rows of a run; an empty list if the run has none."""
    from paddlenlp_ext.cli.eval_rows import find_eval_rows  # imports NumPy

    rows = find_eval_rows(run)
    return [] if rows is None else ["--data", str(rows)]


def _default_out(argv: Sequence[str], run: RunFolder, suffix: str | None) -> list[str]:
    if suffix is None or names(argv, "out", "output_path", "output_file", "output_dir"):
        return []
    return ["--out", f"{run.path}{suffix}"]
