"""Copy chat templates of other models from TRL, as input of the tests of conversations.

`data/chat_templates/README.md` names their sources and licences. SmolLM3's template is not part of TRL and is not
written here.

Run as `python -m tests.golden.generators.make_chat_templates_golden` in the environment of the peers.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from tests.golden import DATA

NAMES = {
    "qwen2_5": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5_think",
    "gemma3": "gemma3",
    "llama3_2": "llama3_2",
    "gptoss": "gptoss",
    "qwen2_5_marked": "qwen2_5_training",
    "qwen3_marked": "qwen3_training",
    "qwen3_5_marked": "qwen3_5_think_training",
    "gemma3_marked": "gemma3_training",
    "gptoss_marked": "gptoss_training",
}
"""Name of the golden file -> name of the template in TRL; marked ones have `{% generation %}`."""


def main() -> None:
    """Write the templates."""
    folder = Path(str(distribution("trl").locate_file("trl/chat_templates")))
    for name, source in NAMES.items():
        (DATA / "chat_templates" / f"{name}.jinja").write_bytes((folder / f"{source}.jinja").read_bytes())


if __name__ == "__main__":
    main()
