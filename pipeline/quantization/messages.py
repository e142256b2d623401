"""What the messages of a chat transcript say, whichever template renders them."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def check_message(message: Message, number: int) -> None:
    """ValueError for what no template could say."""
    has = f"(it has {', '.join(map(repr, message)) or 'nothing'})"
    if not isinstance(message.get("role"), str):
        raise ValueError(f'message {number} has no text under "role" {has}')
    if name_kind(message) == "none":
        raise ValueError(f'message {number}, of role "{message["role"]}", has no text under "content" {has}')


def name_kind(message: Message) -> str:
    """Of what a message says: text; parts, a list of texts; calls of tools, beside which text is welcome; none."""
    content = message.get("content")
    if isinstance(message.get("tool_calls"), list) and message["tool_calls"]:
        return "calls"
    if isinstance(content, str):
        return "text"
    return "parts" if isinstance(content, list) and content and all(map(_is_text, content)) else "none"


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def replace_text(message: Message, word: str) -> Message:
    kind = name_kind(message)
    if kind == "calls":
        return message
    return {**message, "content": word if kind == "text" else [{"type": "text", "text": word}]}
