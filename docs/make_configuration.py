"""Update the key tables of docs/configuration.md: `python docs/make_configuration.py`."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.config.docs import markdown_tables
from paddlenlp_ext.config.keys import known_keys
from paddlenlp_ext.peft.registry import peft_methods

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- keys: made by docs/make_configuration.py -->\n", "<!-- end of keys -->\n"


def renew(page: str) -> str:
    """Return the page with its tables generated from the code."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{markdown_tables(known_keys(peft_methods()))}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
