"""Command `pnx completion bash|zsh`: print a script that completes commands, options and file names.

source <(pnx completion bash)
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence

from paddlenlp_ext.commands import pnx
from paddlenlp_ext.commands.arguments import SHORT_NAMES, wants_help
from paddlenlp_ext.utils.suggest import did_you_mean

SHELLS = ("bash", "zsh")
_USAGE = """usage: pnx completion bash|zsh

Print a script that completes commands, their options and file names.

  bash:  source <(pnx completion bash)     in ~/.bashrc
  zsh:   source <(pnx completion zsh)      in ~/.zshrc"""
_SCRIPT = """_pnx() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
    case "$command ${{COMP_WORDS[2]}}" in
{two_words}
    *) case "$command" in
{one_word}
        esac ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; fi
    if [ "$COMP_CWORD" -eq 2 ]; then case "$command" in
{groups}
        esac; fi
    local newline=$'\\n' IFS=$'\\n'
    COMPREPLY=($(compgen -W "${{words// /$newline}}" -- "$current") $(compgen -f -- "${{current//\\\\/}}"))
}}
complete -o filenames -F _pnx pnx
"""
_ZSH = """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
autoload -Uz bashcompinit && bashcompinit
"""


def run(argv: Sequence[str]) -> None:
    """Print the script of a shell.

    Raises:
        ValueError: the shell is not known.
    """
    if not argv or wants_help(argv):
        return print(_USAGE)
    if argv[0] not in SHELLS:
        raise ValueError(f"pnx completion: no script for {argv[0]!r}{did_you_mean(argv[0], SHELLS)} Use bash or zsh")
    print((_ZSH if argv[0] == "zsh" else "") + completion_script(), end="")


def completion_script() -> str:
    """Return the script for bash; zsh runs the same script after `bashcompinit`."""
    options = {name: " ".join(options_of_command(name)) for name in pnx.COMMANDS if name != "completion"}
    options["completion"] = " ".join(SHELLS)
    groups: dict[str, list[str]] = {}
    for name in pnx.COMMANDS:
        first, _, second = name.partition(" ")
        groups.setdefault(first, []).extend([second] if second else [])
    groups["plan"] = list(pnx.TRAINING)
    lines = {
        2: [f'    "{name}") words="{words}" ;;' for name, words in options.items() if " " in name],
        1: [f'        {name}) words="{words}" ;;' for name, words in options.items() if " " not in name],
    }
    members = [f'        {first}) words="{" ".join(seconds)}" ;;' for first, seconds in groups.items() if seconds]
    return _SCRIPT.format(
        two_words="\n".join(lines[2]),
        one_word="\n".join(lines[1]),
        groups="\n".join(members),
        commands=" ".join(groups),
    )


def options_of_command(name: str) -> list[str]:
    """Return the options that the help text of a command lists, in the same order."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        pnx.find_function(name)(["--help"])
    found = re.findall(r"(?:^ +|, )(--?[a-zA-Z][\w-]*)", text.getvalue(), re.MULTILINE)
    return [option for option in dict.fromkeys(found) if option.startswith("--") or option in SHORT_NAMES]
