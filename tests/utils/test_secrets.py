"""Secrets in configurations and command lines."""

from __future__ import annotations

import pytest

from paddlenlp_ext.utils.secrets import command_without_secrets, without_secrets


@pytest.mark.parametrize("key", ["hf_token", "api_key", "apiKey", "HUB_TOKEN", "aws_secret", "password", "keys"])
def test_without_secrets_hides_texts_by_the_name_of_their_key(key):
    assert without_secrets({key: "abc", "n": {key: ["abc"]}}) == {key: "(hidden)", "n": {key: ["(hidden)"]}}


def test_without_secrets_keeps_other_values():
    shown = {"max_new_tokens": 16, "tokenizer_name_or_path": "a", "url": "https://host/a@b", "use_token": True}
    assert without_secrets(shown) == shown


def test_without_secrets_hides_credentials_in_urls():
    assert without_secrets("see https://me:pw@host/x") == "see https://(hidden)@host/x"


def test_command_without_secrets_hides_values_in_both_forms():
    command = ["run.py", "--hub_token", "abc", "--hub-token=abc", "--max_new_tokens", "16", "--seed", "-1"]
    assert command_without_secrets(command) == [
        "run.py", "--hub_token", "(hidden)", "--hub-token=(hidden)", "--max_new_tokens", "16", "--seed", "-1"
    ]  # fmt: skip
