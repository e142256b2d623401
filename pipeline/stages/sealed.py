"""JSON documents that carry their own digest: a flipped bit or a torn write is found, whichever field it hit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.digest import digest_json

if TYPE_CHECKING:
    from collections.abc import Mapping

SEAL = "seal"


def seal(document: Mapping[str, Any]) -> str:
    """The document as text, ending in its seal."""
    return json.dumps({**document, SEAL: digest_json(document)}, indent=1) + "\n"


def unseal(text: bytes) -> dict[str, Any]:
    """The document that `seal` wrote. ValueError where it is another one, or none."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    found = document.pop(SEAL, None)
    if found is None:
        raise ValueError("it has no seal")
    if found != digest_json(document):
        raise ValueError("it was edited: it does not match its own digest")
    return document
