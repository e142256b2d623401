"""Chat transcripts as the model sees them: rendered by the checkpoint's own chat template.

transformers renders it in jinja's immutable sandbox, as it does when the model is served: a template can neither reach
Python's attributes nor change what it is given. Where only a look at a file is wanted, jinja's sandbox alone does, and
loads in a moment. Templates pass over what they do not know; here each message has to leave its text in the rendering.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.errors import QuantizationError
from pipeline.quantization.messages import check_message, name_kind, replace_words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jinja2 import Environment

    from pipeline.quantization.messages import Message, Tools

# Where transformers looks for a tokenizer's templates before its config (chat_template.json is for processors only).
FILE, BESIDE = "chat_template.jinja", "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"  # of several templates; the other where a chat has tools
ROLES = ("system", "user", "assistant", "tool")  # that a template may know
TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# What transformers' templates may mark besides jinja's own statements: where the assistant speaks.
MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
SPELLED_OUT = re.compile(r"""['"]text['"]: ?['"]$""")  # before a text: its list was written as Python or JSON


class ChatTemplate:
    """The template of the tokenizer in `folder`; loaded when the first transcript is rendered. `quick`: without
    transformers, for what the template refuses rather than for what it makes."""

    def __init__(self, folder: Path, *, quick: bool = False) -> None:
        self.folder, self.quick = folder, quick
        self._left_out: dict[tuple[object, ...], int | None] = {}  # by a chat's roles, kinds of content, and tools

    def render(self, messages: list[Message], tools: Tools = None) -> str:
        """The conversation's text, without a prompt for another answer. ValueError says why the template refuses it, or
        which message has no text or leaves none. `tools` that the template passes over the model never sees."""
        for i, message in enumerate(messages):
            check_message(message, i + 1)
        try:
            text = self._apply(messages, tools)
        except ValueError:
            # A template that knows no calls stumbles over what has nothing else.
            said = [{**message, "content": message.get("content") or ""} for message in messages]
            if said != messages:
                self._refuse(said, self._find_left_out(said, tools), tools)
            raise
        shape = (tools is None, *((message["role"], name_kind(message)) for message in messages))
        if shape not in self._left_out:
            self._left_out[shape] = self._find_left_out(messages, tools)
        self._refuse(messages, self._left_out[shape], tools)
        return text

    def _apply(self, messages: Sequence[Message], tools: Tools) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            return self._render_quickly(messages, tools) if self.quick else self._render(messages, tools)
        except TemplateSyntaxError as error:
            raise QuantizationError(
                f"{self.folder}: line {error.lineno} of the tokenizer's chat template is broken: {error.message}",
                hint="copy the template from the model's own repository",
            ) from error
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the model's chat template refuses it: {error}") from error

    def _find_left_out(self, messages: Sequence[Message], tools: Tools) -> int | None:
        """The first message that is not in the rendering, told by words put in its place: of the text itself a template
        may keep a part, as of an answer what follows the reasoning."""
        words = [f"(message {i} in its place)" for i in range(len(messages))]
        try:
            text = self._apply([replace_words(*each) for each in zip(messages, words, strict=True)], tools)
        except ValueError:
            return None  # a template that looks into the text
        text = text.lower()  # templates may write capitals
        for i, (message, word) in enumerate(zip(messages, words, strict=True)):
            before, found, _ = text.partition(word)
            if not found or (name_kind(message) == "parts" and SPELLED_OUT.search(before)):
                return i
        return None

    def _refuse(self, messages: Sequence[Message], left_out: int | None, tools: Tools) -> None:
        """ValueError where a message is left out."""
        if left_out is not None:
            raise ValueError(self._explain(messages[left_out], left_out + 1, tools))

    def _explain(self, message: Message, number: int, tools: Tools) -> str:
        role = message["role"]
        knows = [known for known in ROLES if self._knows(known, tools)]
        if role in knows and name_kind(message) == "parts":
            return f"the model's chat template takes no list as the content of message {number}: write its text"
        if role in knows and name_kind(message) == "calls":
            return f'the model\'s chat template leaves out the tool calls of message {number}, of role "{role}"'
        known = f" (it knows {', '.join(knows)})" if knows else ""
        return f'the model\'s chat template leaves out message {number}, of role "{role}"{known}'

    def _knows(self, role: str, tools: Tools) -> bool:
        ask, word = {"role": "user", "content": "question"}, "(words of that role)"
        said = {"role": role, "content": word}
        for chat in ([said], [said, ask], [ask, said]):
            try:
                if word in self._apply(chat, tools).lower():
                    return True
            except ValueError:
                continue
        return False

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        return str(self._tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False))

    def _render_quickly(self, messages: Sequence[Message], tools: Tools) -> str:
        name = TOOL_USE if tools is not None and TOOL_USE in self._source[0] else DEFAULT
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        template = self._environment.get_template(name)
        return template.render(messages=given, tools=tools, documents=None, add_generation_prompt=False)

    def check(self) -> None:
        """Raises QuantizationError where the folder holds no template, without loading what renders it."""
        _ = self._source

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        self.check()
        return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)

    @cached_property
    def _environment(self) -> Environment:
        """With the templates, and the special tokens that they may name; "" for what the tokenizer's config leaves
        out."""
        from datetime import datetime

        from jinja2 import DictLoader, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        sources, config = self._source
        environment = ImmutableSandboxedEnvironment(
            loader=DictLoader({name: MARKS.sub("", source) for name, source in sources.items()}),
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False, **options})
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        found = {name: config.get(name) or "" for name in TOKENS}
        for name, token in found.items():
            environment.globals[name] = str(token["content"] if isinstance(token, dict) else token)
        return environment

    @cached_property
    def _source(self) -> tuple[dict[str, str], dict[str, Any]]:
        """The templates that transformers would choose from, DEFAULT among them, and the tokenizer's config."""
        file = self.folder / "tokenizer_config.json"
        if not file.is_file():
            raise QuantizationError(
                f"{self.folder} has no tokenizer_config.json, and so no chat template",
                hint="put the model's tokenizer_config.json beside config.json, or calibrate on plain text",
            )
        config = _read_object(file)
        files = {path.stem: path for path in sorted((self.folder / BESIDE).glob("*.jinja"))}
        if (file := self.folder / FILE).is_file():
            files.setdefault(DEFAULT, file)
        found = {name: _read_text(path) for name, path in files.items()}
        named = None if found else config.get("chat_template")
        if isinstance(named, list):
            found = {each["name"]: each["template"] for each in named if each.keys() >= {"name", "template"}}
        elif isinstance(named, str) and named:
            found = {DEFAULT: named}
        if DEFAULT in found:
            return found, config
        raise QuantizationError(
            f"{self.folder}: the tokenizer has no chat template, which chat transcripts need",
            hint="put the model's chat_template.jinja beside config.json, or calibrate on plain text",
        )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it is {type(values).__name__}")
    except ValueError as error:
        raise QuantizationError(
            f"{file} holds no JSON object: {error}", hint="copy it from the model's own repository"
        ) from error
    return values


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QuantizationError(
            f"{file} is no UTF-8 text: {error}", hint="copy it from the model's own repository"
        ) from error
