"""Write a conversation as plain text, for tables of trackers and for terminals."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

_CHARACTERS = 4000  # most of a message
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_KEPT = "\n\t\u200c\u200d"  # the last two join letters


def conversation_text(row: Mapping[str, Any]) -> str:
    """Return the conversation of a rollout's row: roles, calls, answers, rewards and why it ended.

    Characters that move a cursor, colour a terminal or reorder others become their codes.
    """
    return visible("\n".join(_lines(row)))


def visible(text: str) -> str:
    r"""Return a text whose hidden characters are codes, such as \x1b and U+202E."""
    if text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"U+{number:04X}"


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    turn = 0
    for message in row["conversation"]:
        role = str(message["role"])
        if role == "assistant":
            turn += 1
            earned = [f"{name} {value:g}" for name, value in message.get("rewards", {}).items()]
            yield f"[assistant {turn}{': ' if earned else ''}{', '.join(earned)}]"
        else:
            named = f" {message['name']}" if message.get("name") else ""
            failed = " failed" if message.get("is_error") else ""
            unseen = ", not seen by the model" if message.get("unseen") else ""
            yield f"[{role}{named}{failed}{unseen}]"
        yield _short(message.get("content", ""))
        for call in message.get("calls", ()):
            given = ", ".join(
                f"{name}={_short(value)}" for name, value in call["arguments"].items()
            )
            yield f"-> {call['name']}({given})"
        if message.get("problem"):
            yield f"-> cannot be read: {_short(message['problem'])}"
    yield f"[ended: {row['end']}]"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = len(text) - _CHARACTERS
    return text if cut <= 0 else f"{text[:_CHARACTERS]} … {cut:,} more characters"
