"""Chat transcripts as the model sees them: rendered by the checkpoint's own chat template.

transformers renders it in jinja's immutable sandbox, as it does when the model is served: a template can neither reach
Python's attributes nor change what it is given.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from pathlib import Path


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

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if not (self.folder / "tokenizer_config.json").is_file():
            raise QuantizationError(
                f"{self.folder} has no tokenizer_config.json, and so no chat template",
                hint="put the model's tokenizer_config.json beside config.json, or calibrate on plain text",
            )
        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        if not tokenizer.chat_template:
            raise QuantizationError(
                f"{self.folder}: the tokenizer has no chat template, which chat transcripts need",
                hint="put the model's chat_template.jinja beside config.json, or calibrate on plain text",
            )
        return tokenizer
