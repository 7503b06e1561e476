"""Write peft_types.json: the types of adapters that the installed version of Hugging Face PEFT has.

Run where `peft` is installed:
    python -m tests.golden.generators.make_peft_types_golden
"""

from __future__ import annotations

import json

import peft

from tests.golden import DATA


def main() -> None:
    """Write the version and the sorted names."""
    content = {"version": peft.__version__, "types": sorted(kind.value for kind in peft.PeftType)}
    (DATA / "peft_types.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
