"""Update the table of fields in docs/reference/data_formats.md: `python docs/make_data.py`."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.data.rows.known_fields import markdown_table

PAGE = Path(__file__).parent / "reference" / "data_formats.md"
BEGIN, END = "<!-- fields: made by docs/make_data.py -->\n", "<!-- end of fields -->\n"


def renew(page: str) -> str:
    """Return the page with its table generated from the code."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{markdown_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
