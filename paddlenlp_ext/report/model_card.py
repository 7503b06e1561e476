"""Write the model card of a run for the Hugging Face hub: README.md with metadata, training, results and commands.

The card does not contain data rows, secrets or local paths. The value of a key that names files is included only if the
value is a hub id or the name of a built-in model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from paddlenlp_ext.report.findings import outcome, verdict
from paddlenlp_ext.report.line_chart import format_value
from paddlenlp_ext.report.run_folder import HISTORY_FILE, Run, read_run
from paddlenlp_ext.utils.files import read_json_object, write_text
from paddlenlp_ext.utils.secrets import HIDDEN

CARD_FILE = "README.md"
MARK = "<!-- Written by paddlenlp_ext. The next upload rewrites this page, unless you remove this line. -->"
_HUB_ID = re.compile(r"(?:huggingface:)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")
_LOCAL_PATH = re.compile(r"/|[A-Za-z]:\\")
_FILE_KEY = re.compile(r"_(path|dir|file)s?$|^callbacks$|^hub_")
_LOCAL_KEYS = ("overwrite_output_dir", "resume_from_checkpoint", "run_name", "report_to", "disable_tqdm", "push_to_hub")
_NOT_IN_PEFT = ("BOTTLENECK_ADAPTER", "MORA", "MOSLORA", "REFT", "SORA")
_HIDDEN_METRICS = ("runtime", "_per_second", "_num_rows", "_num_target_tokens")
_METHODS = {
    "sft": "supervised fine-tuning",
    "dpo": "preference training",
    "reward": "training of a reward model",
}


def write_model_card(folder: Path, run_folder: Path, repo_id: str) -> None:
    """Write README.md to the folder of a run's model or adapter, unless README.md was written by a user.

    Args:
        folder: folder with the weights: `run_folder`, or one of its checkpoints.
        run_folder: the run's output_dir.
        repo_id: repository of the upload, for the commands in the card.

    Raises:
        ValueError: a file of the run is damaged, or the folder is not writable.
    """
    card = folder / CARD_FILE
    is_own = card.is_file() and MARK not in card.read_text(encoding="utf-8", errors="replace")
    if not is_own and (run_folder / HISTORY_FILE).is_file():
        write_text(card, render_model_card(read_run(run_folder), folder, repo_id))


def render_model_card(run: Run, folder: Path, repo_id: str) -> str:
    """Return the model card of a run; see `write_model_card` for the arguments."""
    stored = folder / "adapter_config.json"
    adapter = str(read_json_object(stored).get("peft_type", "adapter")) if stored.is_file() else None
    kind = run.start.get("kind", "sft")
    base = run.config.get("model_name_or_path")
    _, ended = outcome(run)
    what = "Model" if adapter is None else f"{adapter} adapter"
    source = f" of `{base}`" if _is_public("model_name_or_path", base) else ""
    parts = [
        f"---\n{_metadata(run, adapter)}\n---",
        MARK,
        f"# {repo_id.rpartition('/')[2]}",
        f"{what}{source}, from {_METHODS[kind]} with `paddlenlp_ext`. {ended}. {verdict(run).details}".strip(),
        "## Use",
        _fenced(_commands(kind, adapter, repo_id), "bash"),
        *_results(run),
        "## Training",
        f"The keys below differ from the defaults{_versions(run)}.",
        _fenced(_changed_keys(run), "json"),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(run: Run, adapter: str | None) -> str:
    """Return the metadata of the card as YAML, according to the Hugging Face model card specification."""
    from huggingface_hub import ModelCardData

    kind = run.start.get("kind", "sft")
    base = _hub_id(run.config.get("model_name_or_path"))
    names = run.config.get("dataset_name_or_path") or run.config.get("train_dataset_path") or ()
    named = names.split(",") if isinstance(names, str) else names
    library = "transformers" if adapter is None else "paddlenlp_ext" if adapter in _NOT_IN_PEFT else "peft"
    data = ModelCardData(
        base_model=base,
        base_model_relation=base and ("finetune" if adapter is None else "adapter"),
        library_name=library,
        pipeline_tag="text-classification" if kind == "reward" else "text-generation",
        tags=["paddlepaddle", "reward-model" if kind == "reward" else kind, *([adapter.lower()] if adapter else [])],
        datasets=[found for name in named if (found := _hub_id(name))] or None,
    )
    return data.to_yaml().strip()


def _hub_id(name: Any) -> str | None:
    """Return the id of a model or data set on the Hugging Face hub; None for another hub, a path or a built-in name."""
    match = _HUB_ID.fullmatch(name.strip()) if isinstance(name, str) else None
    return None if match is None or Path(name.strip()).exists() else match[1]


def _is_public(key: str, value: Any) -> bool:
    """Return whether the value of a key may be published; secrets and files on this machine may not."""
    texts = json.dumps(value)
    if key in _LOCAL_KEYS or HIDDEN in texts:
        return False
    if not _FILE_KEY.search(key):
        return not _LOCAL_PATH.search(texts)
    is_name = isinstance(value, str) and re.fullmatch(r"[\w-]+", value) and not Path(value).exists()
    return key.endswith("_name_or_path") and bool(_hub_id(value) or is_name)


def _changed_keys(run: Run) -> str:
    changed = {key: value for key, (value, _) in run.start.get("changed_keys", {}).items() if _is_public(key, value)}
    lines = (f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in changed.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def _versions(run: Run) -> str:
    environment = run.start.get("environment", {})
    found = [f"{name} {environment[name]}" for name in ("paddlenlp-ext", "paddlepaddle") if name in environment]
    return f" of {', '.join(found)}" if found else ""


def _results(run: Run) -> list[str]:
    """Return the table of losses and other metrics; an empty list without results."""
    prefixes = ("train_loss", "eval_", "test_")
    shown = {
        name: value
        for name, value in run.results.items()
        if name.startswith(prefixes) and not name.endswith(_HIDDEN_METRICS) and isinstance(value, int | float)
    }
    rows = [f"| `{name}` | {format_value(value)} |" for name, value in shown.items()]
    return ["## Results", "\n".join(["| metric | value |", "| --- | --- |", *rows])] if rows else []


def _commands(kind: str, adapter: str | None, repo_id: str) -> str:
    repo = repo_id if "/" in repo_id else f"USER/{repo_id}"
    folder = repo.rpartition("/")[2]
    if adapter is None and kind != "reward":
        return f"pnx chat {repo}\npnx serve {repo}"
    use = f"pnx predict {folder} -d ROWS.jsonl" if kind == "reward" else f"pnx chat {folder}\npnx serve {folder}"
    return f"hf download {repo} --local-dir {folder}\n{use}"


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
