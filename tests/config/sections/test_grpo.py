"""Keys of GRPO: the table in the reference."""

from __future__ import annotations

import re

from paddlenlp_ext.config.programs import find_program
from tests.common.scripts import ROOT, load_script


def test_grpo_page_lists_the_keys_that_grpo_reads() -> None:
    maker = load_script(ROOT / "docs" / "make_configuration.py")
    page = maker.GRPO_PAGE.read_text(encoding="utf-8")
    assert maker.renew_grpo(page) == page, "run: python docs/make_configuration.py"
    listed = set(re.findall(r"^\| `(\w+)`", page.split(maker.KEYS[0])[1], re.MULTILINE))
    assert {"num_generations", "src_length", "reward_funcs"} <= listed
    assert not listed & find_program("run_grpo.py").unread
