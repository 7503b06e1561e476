"""Check tokens, chat template and the end of answers in llama.cpp, of the files of `export_gguf_for_peers.py`.

Run where `xllamacpp` is installed:
    python -m tests.golden.peer_checks.check_gguf_text_in_llama_cpp FOLDER
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.golden.peer_checks.check_gguf_in_llama_cpp import open_server


def main() -> None:
    failures = 0
    for path in sorted(Path(sys.argv[1]).glob("*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        server = open_server(path.with_suffix(".gguf"))
        address = server.listening_address

        def call(route: str, request: dict[str, Any], address: str = address) -> Any:
            data = json.dumps(request).encode()
            headers = {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(f"{address}/{route}", data, headers)) as answer:
                return json.loads(answer.read())

        tokens = [call("tokenize", {"content": text, "parse_special": True})["tokens"] for text in stored["texts"]]
        equal = sum(found == expected for found, expected in zip(tokens, stored["tokens"], strict=True))
        print(f"{path.stem}: {equal} of {len(tokens)} texts have the same tokens")
        failures += equal != len(tokens)
        for chat in stored["chats"]:
            prompt = call("apply-template", {"messages": chat["messages"]})["prompt"]
            answer = server.handle_chat_completions({"messages": chat["messages"], "temperature": 0, "max_tokens": 40})
            choice = answer["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
            equal = prompt == chat["prompt"], text.strip() == chat["answer"].strip()
            print(f"{path.stem}: prompt, answer equal: {equal}; ended by {reason}, expected {chat['reason']}: {text!r}")
            found = (prompt, text.strip(), reason)
            failures += found != (chat["prompt"], chat["answer"].strip(), chat["reason"])
    sys.exit(int(failures > 0))


if __name__ == "__main__":
    main()
