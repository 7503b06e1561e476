"""Command-line scripts; each calls a program in `paddlenlp_ext/cli`."""
