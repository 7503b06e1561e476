"""Write ollama_templates.json: Ollama templates of chat templates, and the prompts that Go's text/template writes.

Run where this package and Go are installed:
    python -m tests.golden.generators.write_ollama_templates
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from paddlenlp_ext.cli.export_gguf import chat_delimiters
from tests.data.templates.test_chat_templates import byte_tokenizer, template_of
from tests.golden import DATA
from tests.golden.cases.ollama_cases import CHATS, TEMPLATES

PROGRAM = Path(__file__).with_name("ollama_template.go")


def main() -> None:
    written = {}
    for name in TEMPLATES:
        delimiters = chat_delimiters(byte_tokenizer(), template_of(name))
        chats = {key: chat for key, chat in CHATS.items() if key not in TEMPLATES[name]}
        request = json.dumps({"template": delimiters.go_template(), "chats": list(chats.values())})
        done = subprocess.run(["go", "run", PROGRAM], input=request, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        texts = dict(zip(chats, answer["texts"], strict=True))
        written[name] = {"template": delimiters.go_template(), "mark": answer["mark"], "texts": texts}
    (DATA / "ollama_templates.json").write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
