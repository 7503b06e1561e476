"""Parse the command line of the server. Paddle is not imported, so a mistyped argument is reported immediately."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_ext.config.command_line import parse_arguments as parse_command_line
from paddlenlp_ext.config.dataclass_options import option, options_of
from paddlenlp_ext.inference.arguments import ModelArguments
from paddlenlp_ext.utils.distributed_env import require_single_process

USAGE = (
    "python -m paddlenlp_ext.serve --model_name_or_path MODEL [--lora_path NAME=FOLDER ...] [--key value ...]\n\n"
    "Serve OpenAI's API: /v1/models, /v1/chat/completions, /v1/completions; and /health."
)
KEY_VARIABLE = "PADDLENLP_EXT_API_KEY"
_ADAPTERS, _ADAPTERS_ALIAS = "--lora_path", "--adapter"


@dataclass(frozen=True, kw_only=True)
class ServeArguments(ModelArguments):
    """Arguments of the server."""

    lora_path: tuple[str, ...] | None = option(  # type: ignore[override]
        None,
        aliases=("adapter",),
        help="adapters, each as NAME=FOLDER or FOLDER; clients use NAME, by default the last part of FOLDER",
    )
    served_model_name: str | None = option(
        None, help="name of the base model for clients; unset: the last part of its path, or its hub id"
    )
    host: str = option(
        "127.0.0.1", help="address to listen on; an address that other computers can reach requires an API key"
    )
    port: int = option(8000, minimum=0, maximum=65535, help="port to listen on; 0: any free port, which is logged")
    api_key_file: str | None = option(
        None, help=f"file whose first line is the API key; unset: the environment variable {KEY_VARIABLE}, or no key"
    )
    max_batch_size: int = option(16, minimum=1, maximum=1024, help="maximum number of sequences decoded in one batch")
    max_waiting: int = option(256, minimum=1, help="maximum number of sequences that wait in the queue")
    max_total_length: int | None = option(
        None,
        minimum=2,
        help="maximum number of tokens in prompt and answer together; unset: the context length of the model",
    )
    prompt_tokens_per_step: int = option(
        256,
        minimum=1,
        help="maximum number of prompt tokens that a step prefills before the running requests decode a token",
    )
    max_body_bytes: int = option(2097152, minimum=1024, help="maximum size of a request in bytes")
    request_timeout: float = option(600.0, above=0, help="request timeout in seconds; a longer generation fails")
    transfer_timeout: float = option(
        10.0, above=0, help="time limit in seconds for a client to send a request or to accept data"
    )
    shutdown_timeout: int = option(
        60, minimum=1, help="time limit in seconds for running requests after SIGTERM or Ctrl-C"
    )

    @property
    def adapter_path(self) -> str | None:
        """Folder of the first adapter."""
        return next(iter(self.adapters.values()), None)

    @property
    def adapters(self) -> dict[str, str]:
        """Adapter name -> folder.

        Raises:
            ValueError: a name is empty or occurs twice.
        """
        named: dict[str, str] = {}
        for entry in self.lora_path or ():
            name, equals, folder = entry.partition("=")
            if not equals or os.sep in name:
                name, folder = Path(entry).expanduser().resolve().name, entry
            if not name or not folder:
                raise ValueError(
                    f"--lora_path {entry!r} is not NAME=FOLDER; write a name before = and a folder after it"
                )
            if name in named:
                raise ValueError(f"--lora_path: two adapters are named {name!r}; write NAME=FOLDER with unique names")
            named[name] = folder
        return named

    @property
    def base_name(self) -> str:
        """Name of the base model for clients."""
        if self.served_model_name is not None:
            return self.served_model_name
        path = Path(self.model_name_or_path).expanduser()
        return path.resolve().name if path.exists() else self.model_name_or_path

    def api_key(self) -> str | None:
        """Return the API key from the file or the environment, or None if none is set.

        Raises:
            ValueError: the file cannot be read, the key is empty or not ASCII, or a required key is missing.
        """
        source, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
        if self.api_key_file is not None:
            source, path = f"--api_key_file {self.api_key_file}", Path(self.api_key_file).expanduser()
            if not path.is_file():
                raise ValueError(f"{source} is not a file; write the key to a file that only you can read")
            key = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
        if key is not None and (not key or not key.isascii() or not key.isprintable()):
            raise ValueError(f"{source}: the key is empty or not printable ASCII; set another key")
        if key is None and not self.is_local:
            raise ValueError(
                f"--host {self.host}: an address that other computers can reach requires an API key; set "
                f"{KEY_VARIABLE} or --api_key_file"
            )
        return key

    @property
    def is_local(self) -> bool:
        """True if only this computer can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_arguments(argv: Sequence[str], usage: str = USAGE) -> ServeArguments:
    """Parse the command line; `--lora_path` takes one or more values and may be repeated.

    Args:
        argv: the command line without the program's name.
        usage: first lines of the help text.

    Raises:
        ConfigError: unknown arguments, or values of the wrong type or out of range.
        ValueError: adapters, names or API key cannot be used, or a launcher started several processes.
    """
    values, _ = parse_command_line(_join_adapters(argv), options_of(ServeArguments, "arguments"), usage)
    require_single_process("a server")
    arguments = ServeArguments(**values)
    for name in (arguments.base_name, *arguments.adapters):
        if not name.isprintable():
            raise ValueError(
                f"the name {name!r} of a served model has characters that cannot be printed; set --served_model_name, "
                "or write NAME=FOLDER in --lora_path"
            )
    if arguments.base_name in arguments.adapters:
        raise ValueError(
            f"--lora_path: an adapter and the base model are both named {arguments.base_name!r}; write NAME=FOLDER, or "
            "set --served_model_name"
        )
    arguments.api_key()
    return arguments


def _join_adapters(argv: Sequence[str]) -> list[str]:
    """Merge all values of `--lora_path` or `--adapter` into one JSON list."""
    rest: list[str] = []
    entries: list[str] = []
    is_given = follows = False
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word.partition("=")
            follows = "--" + key[2:].replace("-", "_") in (_ADAPTERS, _ADAPTERS_ALIAS)
            is_given |= follows
            entries += [value] if follows and equals else []
            rest += [] if follows else [word]
        elif follows:
            entries.append(word)
        else:
            rest.append(word)
    values = [json.dumps(entries)] if entries else []
    return [*rest, _ADAPTERS, *values] if is_given else rest
