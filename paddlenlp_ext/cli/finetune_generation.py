"""Translate the command line of finetune_generation.py, the former name of run_finetune.py."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.config.config_files import FILE_SUFFIXES, read_file

_USAGE = "finetune_generation.py --config CONFIG.json [--lora LORA.json | --q_lora LORA.json] [--key value ...]"
_FORMAT_KEY, _QLORA_FORMAT = "weight_quantize_algo", "nf4"


def run_finetune_arguments(argv: Sequence[str]) -> list[str]:
    """Return the equivalent command line of run_finetune.py.

    | argument | translation |
    | --- | --- |
    | `--config FILE` | `FILE` |
    | `--lora FILE` | unchanged; it sets `lora: true` and the keys of FILE |
    | `--q_lora FILE` | `--lora FILE --weight_quantize_algo nf4`; a format set in a file or argument takes precedence |

    Raises:
        ValueError: no file follows `--config` or `--q_lora`.
    """
    words = [part for word in argv for part in _split(word)]
    translated: list[str] = []
    wants_format = False
    while words:
        word = words.pop(0)
        key = _key(word)
        if key in ("config", "q_lora"):
            if not words or not words[0].endswith(FILE_SUFFIXES):
                raise ValueError(f"a .json or .yaml file is missing after {word}; usage: {_USAGE}")
            translated += ([] if key == "config" else ["--lora"]) + [words.pop(0)]
            wants_format = wants_format or key == "q_lora"
        else:
            translated.append(word)
    if wants_format and not _sets_format(translated):
        translated += [f"--{_FORMAT_KEY}", _QLORA_FORMAT]
    return translated


def _key(word: str) -> str:
    """Return the key of an argument `--key` or `--key=value`, with underscores; return "" for other arguments."""
    return word.removeprefix("--").partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def _split(word: str) -> list[str]:
    """Split `--config=FILE` into key and file; return other arguments unsplit."""
    return word.split("=", 1) if _key(word) in ("config", "lora", "q_lora") else [word]


def _sets_format(words: Sequence[str]) -> bool:
    """Return whether a file or an argument sets weight_quantize_algo; the parser reports invalid files later."""
    files = [word for word in words if word.endswith(FILE_SUFFIXES)]
    keys = {setting.key for file in files for setting in read_file(file)[0] if setting.value is not None}
    return _FORMAT_KEY in keys or _FORMAT_KEY in map(_key, words)
