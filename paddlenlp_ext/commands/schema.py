"""Command `pnx schema`: print the JSON schema of configurations, so that editors complete and check keys."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.commands.arguments import wants_help
from paddlenlp_ext.commands.help import PROGRAMS
from paddlenlp_ext.config.help_text import schema_file
from paddlenlp_ext.utils.suggest import did_you_mean

_USAGE = """usage: pnx schema [sft|dpo|reward|grpo|quantize] [--path]

Print the JSON schema of configurations, by default of `pnx sft`. Editors complete and check the
keys of a file that names the schema: "$schema": "PATH" (docs/configuration.md).

  --path                        print the path of the schema in the installed package
"""


def run(argv: Sequence[str]) -> None:
    """Print a schema, or its path.

    Raises:
        ValueError: the arguments are not the name of a command that reads a configuration.
    """
    if wants_help(argv):
        print(_USAGE, end="")
        return
    names = [word for word in argv if word != "--path"] or ["sft"]
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown or len(names) > 1:
        wrong = (unknown or names[1:])[0]
        raise ValueError(
            f"pnx schema: no schema for {wrong!r}{did_you_mean(wrong, PROGRAMS)} Use one of {', '.join(PROGRAMS)}"
        )
    file = schema_file(names[0])
    print(file if "--path" in argv else file.read_text(encoding="utf-8"), end="\n" if "--path" in argv else "")
