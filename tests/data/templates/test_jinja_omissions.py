"""Check for content that a template does not write, on conversations made to be slow."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.data.rows.conversation import SYSTEM, USER, Conversation, Message
from paddlenlp_ext.data.templates.jinja_omissions import check_all_written


def test_check_of_many_system_messages_searches_the_text_once():
    """Count the searches for a single label: one search per label needs quadratic time."""
    num_searched = 0

    class Text(str):
        __slots__ = ()

        def __contains__(self, label):
            nonlocal num_searched
            num_searched += 1
            return str.__contains__(self, label)

    class Renderer:
        def text_of(self, conversation, kwargs):
            return Text("".join(message.content for message in conversation.messages))

    systems = [Message(role=SYSTEM, content=f"rule {index}") for index in range(500)]
    conversation = Conversation((*systems, Message(role=USER, content="hi")))
    renderer: Any = Renderer()
    check_all_written(renderer, conversation, {})
    assert num_searched == 0
