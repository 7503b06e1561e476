"""Language of a text."""

from __future__ import annotations

import pytest

from paddlenlp_ext.data.audit.languages import UNKNOWN, language_of


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the past tense of the verb?", "English"),
        ("Was ist die Hauptstadt von Frankreich, und wie heißt der Fluss?", "German"),
        ("Quelle est la capitale de la France et que sont les fleuves du pays ?", "French"),
        ("¿Cuál es la capital de España y por qué es más grande que los otros?", "Spanish"),
        ("Qual é a capital do Brasil e por que não é uma cidade antiga?", "Portuguese"),
        ("Qual è la capitale della Francia e che cosa sono gli affluenti?", "Italian"),
        ("Wat is de hoofdstad van het land en hoe wordt dat aangegeven?", "Dutch"),
        ("你好，法国的首都是哪里？", "Chinese"),
        ("フランスの首都はどこですか。", "Japanese"),
        ("프랑스의 수도는 어디입니까?", "Korean"),
        ("Какая столица Франции?", "Cyrillic script"),
        ("ما هي عاصمة فرنسا؟", "Arabic script"),
        ("What is 你好 in the language of the north?", "English"),
        ("carried", UNKNOWN),
        ("12 + 30 = 42", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_language_of_follows_script_and_frequent_words(text, language):
    assert language_of(text) == language
