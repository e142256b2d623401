"""Chat transcripts as the model sees them: rendered by the checkpoint's own chat template.

transformers renders it in jinja's immutable sandbox, as it does when the model is served: a template can neither reach
Python's attributes nor change what it is given.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from pathlib import Path


# Where transformers looks for a template, besides the tokenizer's config.
BESIDE = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


class ChatTemplate:
    """The template of the tokenizer in `folder`; loaded when the first transcript is rendered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The conversation's text, without a prompt for another answer. ValueError says why the template refuses it."""
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the model's chat template refuses it: {error}") from error

    def check(self) -> None:
        """Raises QuantizationError where the folder holds no template, without loading anything."""
        file = self.folder / "tokenizer_config.json"
        if not file.is_file():
            raise QuantizationError(
                f"{self.folder} has no tokenizer_config.json, and so no chat template",
                hint="put the model's tokenizer_config.json beside config.json, or calibrate on plain text",
            )
        if not any((self.folder / name).exists() for name in BESIDE) and not _names_template(file):
            raise self._lacks_template()

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        self.check()
        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        if not tokenizer.chat_template:
            raise self._lacks_template()
        return tokenizer

    def _lacks_template(self) -> QuantizationError:
        return QuantizationError(
            f"{self.folder}: the tokenizer has no chat template, which chat transcripts need",
            hint="put the model's chat_template.jinja beside config.json, or calibrate on plain text",
        )


def _names_template(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_bytes()).get("chat_template"))
    except (ValueError, AttributeError) as error:
        raise QuantizationError(
            f"{file} holds no JSON object: {error}", hint="copy it from the model's own repository"
        ) from error
