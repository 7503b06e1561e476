"""Command `pnx configs`: find the configurations that the package ships, and copy one."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.commands.arguments import wants_help
from paddlenlp_ext.config.help_text import WIDTH, show_default
from paddlenlp_ext.utils.shipped_configs import shipped_configs_folder
from paddlenlp_ext.utils.storage_errors import explained_errors

_USAGE = """usage: pnx configs [WORDS] [--copy [DEST]]

List the shipped configurations that have all WORDS in their path, method, model or keys, and the
settings that differ between them.

  --copy [DEST]                 if one file is listed, copy it to DEST, a file or a folder; default:
                                FAMILY_METHOD.json in the current folder. No file is overwritten.

examples: pnx configs dpo lora; pnx configs smollm2/lora_argument --copy run.json
"""
_PROGRAMS = {"dpo": "dpo", "reward": "reward", "grpo": "grpo", "ptq": "quantize", "gptq": "quantize", "awq": "quantize"}
"""First word of a file name -> command that reads the file; `pnx sft` reads all other files."""
_MOST_COMPARED = 60
_NOT_COMPARED = (
    *("model_name_or_path", "output_dir", "dataset_name_or_path", "train_dataset_path", "dev_dataset_path"),
    *("do_train", "do_eval"),
)


@dataclass(frozen=True)
class ShippedConfig:
    """Shipped configuration.

    Attributes:
        path: the file.
        name: path below the folder of the shipped configurations.
        settings: keys and values in the file.
    """

    path: Path
    name: str
    settings: dict[str, Any]

    @property
    def method(self) -> str:
        """Return the method after which the file is named, such as "qlora"."""
        return self.path.stem.removesuffix("_argument")

    @property
    def command(self) -> str:
        return _PROGRAMS.get(self.method.partition("_")[0], "sft")

    @property
    def model(self) -> str:
        return str(self.settings.get("model_name_or_path", ""))

    def has(self, word: str) -> bool:
        """Return whether the path, command, model or a key contains a word, ignoring case."""
        return word.lower() in f"{self.name} {self.command} {self.model} {' '.join(self.settings)}".lower()


def run(argv: Sequence[str]) -> None:
    """List shipped configurations, or copy one.

    Raises:
        ValueError: no file has all words, several files would be copied, or the copy exists or cannot be written.
    """
    if wants_help(argv):
        print(_USAGE, end="")
        return
    words, destination = _split(argv)
    found = find_configs(words)
    if destination is None:
        print(table(found))
    else:
        config = _only(found, words)
        print(f"{copy_config(config, destination)}: copied; start the run with `pnx {config.command} FILE`")


def find_configs(words: Sequence[str]) -> list[ShippedConfig]:
    """Return the shipped configurations that have all words, or only the configuration whose path is the first word.

    Raises:
        ValueError: no configuration has all words.
    """
    folder = shipped_configs_folder()
    configs = [
        ShippedConfig(path, path.relative_to(folder).as_posix(), json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.rglob("*.json"))
    ]
    found = [config for config in configs if all(config.has(word) for word in words)]
    named = (
        [config for config in found if config.name.removesuffix(".json") == words[0].removesuffix(".json")]
        if words
        else []
    )
    if not found:
        missing = [word for word in words if not any(config.has(word) for config in configs)]
        why = f"no file has {' or '.join(map(repr, missing))}" if missing else "no file has all of these words"
        raise ValueError(f"pnx configs {' '.join(words)}: {why}; `pnx configs` lists all {len(configs)} files")
    return named or found


def table(configs: Sequence[ShippedConfig]) -> str:
    """Return a table of configurations.

    In a table of at most `_MOST_COMPARED` files, a line below each file shows the settings that differ between files.
    """
    rows = [("file", "method", "model"), *((each.name, each.method, Path(each.model).name) for each in configs)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(configs) > _MOST_COMPARED:
        return "\n".join([*lines, "", f"{len(configs)} files; add words to see what differs between files"])
    compared = [lines[0]]
    for config, line in zip(configs, lines[1:], strict=True):
        differences = textwrap.shorten(_differences(config, configs), WIDTH - 4, placeholder=" ...")
        compared += [line, f"    {differences}"] if differences else [line]
    return "\n".join(compared)


def copy_config(config: ShippedConfig, destination: str) -> Path:
    """Copy a configuration to a file or into a folder ("": the current folder); return the path of the copy.

    Raises:
        ValueError: the file exists, or cannot be written.
    """
    target = Path(destination).expanduser()
    if not destination or target.is_dir():
        target /= f"{config.path.parent.name}_{config.method}.json"
    with explained_errors(target):
        try:
            with open(target, "x", encoding="utf-8") as file:
                file.write(config.path.read_text(encoding="utf-8"))
        except FileExistsError:
            raise ValueError(f"{target}: the file exists; write another path after --copy") from None
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{target}: {target.parent} is not a folder; create it, or choose another path") from None
    return target


def _split(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the words, and the path after --copy; the path is "" if --copy comes last, and None without --copy."""
    words = [word for word in argv if word != "--copy"]
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise ValueError(f"pnx configs: {unknown[0]} is not an option; `pnx configs --help` lists the options")
    if "--copy" not in argv:
        return words, None
    place = list(argv).index("--copy")
    return list(argv[:place]), " ".join(argv[place + 1 :])


def _only(found: Sequence[ShippedConfig], words: Sequence[str]) -> ShippedConfig:
    if len(found) > 1:
        names = ", ".join(config.name for config in found[:6]) + (", ..." if len(found) > 6 else "")
        raise ValueError(
            f"pnx configs {' '.join(words)}: {len(found)} files match ({names}); write the path of one file"
        )
    return found[0]


def _differences(config: ShippedConfig, others: Sequence[ShippedConfig]) -> str:
    """Return the settings of a file that some listed files do not share, the rarest value first."""
    shared = {key: sum(other.settings.get(key) == value for other in others) for key, value in config.settings.items()}
    different = [key for key, count in shared.items() if count < len(others) and key not in _NOT_COMPARED]
    return ", ".join(
        f"{key}: {show_default(config.settings[key])}" for key in sorted(different, key=shared.__getitem__)
    )
