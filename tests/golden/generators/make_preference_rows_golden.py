"""Write preference_rows.json: prompt and answers of preference rows as TRL splits and renders them.

Run as `python -m tests.golden.generators.make_preference_rows_golden` in the environment of the peers.
"""

from __future__ import annotations

import json

from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt

from tests.data.tiny_tokenizers import CHATML, make_tokenizer
from tests.golden import DATA
from tests.golden.cases.preference_row_cases import ROWS


def main() -> None:
    """Write the texts."""
    tokenizer = make_tokenizer(eos="<|im_end|>")
    tokenizer.chat_template = CHATML
    texts = {name: maybe_apply_chat_template(maybe_extract_prompt(row), tokenizer) for name, row in ROWS.items()}
    (DATA / "preference_rows.json").write_text(json.dumps(texts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
