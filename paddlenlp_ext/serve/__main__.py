"""Serve a model, with or without adapters: python -m paddlenlp_ext.serve --help."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.serve.arguments import parse_arguments
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Parse the command line before the slow import of Paddle, then serve."""
    arguments = parse_arguments(argv)
    require_paddle()
    from paddlenlp_ext.serve.server import serve

    serve(arguments)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
