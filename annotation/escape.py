"""Text as it must be stored so that the annotators' page shows it literally, character for character.

The page puts a plain field's text into the document as HTML, in `TextField(use_markdown=False)` and in the messages of
`ChatField(use_markdown=False)`. With `&` and `<` written as entities nothing in the text is markup, and nothing in it is an entity that the
author did not type. Prompts and responses go into these two kinds of field only: markdown would eat indentation, `**` and backslashes, and
custom fields run scripts. Guidelines are the lead's own markdown and are not escaped.

Standard library only.
"""

from __future__ import annotations

from typing import TypedDict

ENTITIES = str.maketrans({
    "&": "&amp;",
    "<": "&lt;",
    "\r": "&#13;",      # an HTML parser turns a bare carriage return into a line feed
    "\0": "\N{SYMBOL FOR NULL}",    # HTML drops it, and PostgreSQL refuses the whole text
})


class ShownMessage(TypedDict):
    """A message of a `ChatField(use_markdown=False)`."""

    role: str
    """Shown as a label above the message; the page does not read it as HTML."""
    content: str


def shown_text(text: str) -> str:
    """For a `TextField(use_markdown=False)`."""
    return text.translate(ENTITIES)


def shown_message(role: str, content: str) -> ShownMessage:
    """For a `ChatField(use_markdown=False)`."""
    return {"role": role, "content": shown_text(content)}
