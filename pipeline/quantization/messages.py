"""What the messages of a chat transcript say, whichever template renders them."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
SHAREGPT = (
    ': ShareGPT\'s form; write "messages", "role" and "content" for "conversations", "from" and "value", and the roles '
    "user and assistant for human and gpt"
)


def check_message(message: Message, number: int) -> None:
    """ValueError for what no template could say."""
    has = f"(it has {', '.join(map(repr, message)) or 'nothing'})"
    if not isinstance(message.get("role"), str):
        raise ValueError(f'message {number} has no text under "role" {has}{SHAREGPT if is_sharegpt([message]) else ""}')
    if name_kind(message) == "none":
        raise ValueError(f'message {number}, of role "{message["role"]}", has no text under "content" {has}')


def is_sharegpt(messages: object) -> bool:
    """Whether the messages have ShareGPT's keys in place of role and content."""
    return isinstance(messages, list) and all(
        isinstance(each, dict) and {"from", "value"} <= each.keys() for each in messages
    )


def name_kind(message: Message) -> str:
    """What says of a message that it is there: text; parts, a list of texts; calls of tools; none of them.

    What is said beside a call is not asked for: templates leave it out, DeepSeek-V3's among them, and so no model that
    they serve ever sees it.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(calls, list) and calls and all(isinstance(call, dict) for call in calls):
        return "calls" if content is None or _is_said(content) else "none"
    return ("text" if isinstance(content, str) else "parts") if _is_said(content) else "none"


def _is_said(content: object) -> bool:
    return isinstance(content, str) or (isinstance(content, list) and bool(content) and all(map(_is_text, content)))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def replace_words(message: Message, word: str) -> Message:
    """The message with `word` for what says that it is there: the text, or the functions' names."""
    kind = name_kind(message)
    if kind == "calls":
        return {**message, "tool_calls": [_rename(call, word) for call in message["tool_calls"]]}
    return {**message, "content": word if kind == "text" else [{"type": "text", "text": word}]}


def _rename(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    return {**call, "function": {**function, "name": name}} if isinstance(function, dict) else {**call, "name": name}
