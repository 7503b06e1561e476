"""Command-line scripts, which call the programs in `paddlenlp_ext/cli`."""
