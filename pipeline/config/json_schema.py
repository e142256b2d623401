"""The JSON Schema of the config files, for editors. A rendered copy is committed as `schema.json` beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config

PATH = Path(__file__).with_name("schema.json")
EXTENDS = {
    "title": "Extends",
    "description": "Files to start from, relative to this one: maps merge key by key, lists and values are replaced.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def render_schema() -> str:
    """JSON text. Nothing is required in it, since what one file leaves out another may bring by `extends`."""
    schema = Config.model_json_schema()
    _drop_required(schema)
    schema["properties"] = {"extends": EXTENDS, **schema["properties"]}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "trtseek config"}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _drop_required(node: Any) -> None:
    if isinstance(node, dict):
        if isinstance(node.get("required"), list):
            del node["required"]
        for child in node.values():
            _drop_required(child)
