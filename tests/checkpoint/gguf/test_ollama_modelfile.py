"""Modelfiles of Ollama: delimiters of chat templates, and the template in Go's language."""

from __future__ import annotations

import pytest

from paddlenlp_ext.checkpoint.gguf.ollama_modelfile import ChatDelimiters, find_delimiters, modelfile


def chatml(question, history, system):
    turns = [part for asked, answer in history for part in (("user", asked), ("assistant", answer))]
    messages = [("system", "Be kind." if system is None else system), *turns, ("user", question)]
    return "".join(f"<|{role}|>\n{text}<|end|>\n" for role, text in messages) + "<|assistant|>\n"


def llama2(question, history, system):
    first = history[0][0] if history else question
    head = f"[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{first}" if system else f"[INST] {first}"
    text = "".join(f"{asked if i else head} [/INST] {said} </s><s>[INST] " for i, (asked, said) in enumerate(history))
    return f"{text}{question if history else head} [/INST]"


def gemma(question, history, system):
    if system is not None:
        raise ValueError("no system role")
    return chatml(question, history, "")


def numbered(question, history, system):
    return f"turn {len(history)}: {chatml(question, history, system)}"


@pytest.mark.parametrize("template", [chatml, llama2, gemma])
def test_chat_pieces_write_the_text_of_the_template(template):
    delimiters = find_delimiters(template)
    history = [("a", "b"), ("c", "d")]
    assert delimiters.write("e", history, None) == template("e", history, None)
    if template is gemma:
        assert delimiters.system is None
    else:
        assert delimiters.write("e", history, "s") == template("e", history, "s")


def test_chat_pieces_of_a_template_with_other_text_by_turn_are_none():
    assert find_delimiters(numbered) is None


def test_modelfile_has_template_and_stop_tokens():
    delimiters = ChatDelimiters('<u "q">\n', ("<s>", "<u>"), "\n<a>{{", " ", "<e>")
    assert modelfile("m.gguf", delimiters, ["<e>", '"'], {"temperature": 0.6, "do_sample": True}) == (
        'FROM ./m.gguf\nTEMPLATE """{{ $first := true }}{{ range .Messages }}{{ if eq .Role "user" }}{{ if $first }}'
        '{{ if $.System }}{{ "<s>" }}{{ $.System }}{{ "<u>" }}{{ else }}{{ "<u \\"q\\">\\n" }}{{ end }}'
        '{{ else }}{{ "<e>" }}{{ end }}{{ .Content }}{{ "\\n<a>{{" }}{{ $first = false }}'
        '{{ else if eq .Role "assistant" }}{{ " " }}{{ .Content }}{{ end }}{{ end }}"""\n'
        'PARAMETER stop "<e>"\nPARAMETER stop "\\""\nPARAMETER temperature 0.6\n'
    )


def test_modelfile_without_sampling_has_temperature_0_and_the_repetition_penalty():
    generation = {"do_sample": False, "temperature": 0.7, "top_k": 20}
    assert modelfile("m.gguf", None, [], generation) == "FROM ./m.gguf\nPARAMETER temperature 0\n"
    text = modelfile("m.gguf", None, [], {**generation, "repetition_penalty": 1.1})
    assert text == "FROM ./m.gguf\nPARAMETER temperature 0\nPARAMETER repeat_penalty 1.1\n"
