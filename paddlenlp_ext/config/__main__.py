"""`python -m paddlenlp_ext.config`: the key tables of docs/configuration.md."""

from __future__ import annotations

import sys

from paddlenlp_ext.config.describe import markdown_tables
from paddlenlp_ext.config.known import known_keys

if __name__ == "__main__":
    sys.stdout.write(markdown_tables(known_keys({})))
