"""Transcripts as transformers renders them, and what a template leaves out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeline.errors import QuantizationError
from pipeline.quantization.calibration_files import PlainFile
from pipeline.quantization.chat import ChatTemplate
from pipeline.quantization.documents import Documents
from tests.quantization.texts import CHATS, PLAIN, ask, sample, set_template, write_lines


def test_transcripts_are_what_transformers_renders(tokenizer: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    rendered = [theirs.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in CHATS]
    assert all(ids[0] == 0 and ids.count(0) == 1 and ids[-1] == 1 for ids in rendered)
    stream = [token for ids in rendered for token in ids[1:]]
    count = len(stream) // 15
    tokens = sample(tokenizer, path, samples=count, length=16, bos=0)
    assert (tokens[:, 0] == 0).all() and not (tokens[:, 1:] == 0).any()  # one BOS, at the beginning of each piece
    assert tokens[:, 1:].flatten().tolist() == stream[: count * 15]


def test_templates_run_in_a_sandbox(tokenizer: Path, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(QuantizationError, match=r"chats.jsonl:1: the model's chat template refuses it: .*unsafe"):
        sample(tokenizer, path)


def test_a_model_without_a_template(tokenizer: Path, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(QuantizationError, match="has no chat template"):
        sample(tokenizer, path)


# DeepSeek-LLM's, and one in R1's manner: of an answer only what follows the reasoning.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
)


REASONING = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'].split('</think>')[-1] | trim }}\n{% endfor %}"
    "{%- for m in messages if m.tool_calls %}{{ m.tool_calls | tojson }}{% endfor %}"
)


PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% generation %}{{ p.text }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
)


V3_CALLS = (  # as DeepSeek-V3's does, nothing of what is said beside a call
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "({{ c.function.arguments }}){% endfor %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)


REFUSING = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"


CALLS = [{"type": "function", "function": {"name": "look_up", "arguments": {"of": "é"}}}]


LISTED = [{"type": "text", "text": "since"}]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("template", "answer", "problem"),
    [
        (DEEPSEEK, {"from": "gpt", "value": "x"}, "(it has 'from', 'value'): ShareGPT's form; write \"messages\", "),
        (DEEPSEEK, {"role": "assistant"}, 'message 2, of role "assistant", has no text under "content"'),
        (DEEPSEEK, {"role": "assistant", "content": None}, 'message 2, of role "assistant", has no text'),
        (DEEPSEEK, {"role": "assistant", "content": [{"type": "image"}]}, 'message 2, of role "assistant", has no'),
        (
            DEEPSEEK,
            {"role": "Bot", "content": "why"},
            'leaves out message 2, of role "Bot" (it knows system, user, assistant)',
        ),
        (DEEPSEEK, {"role": "assistant", "content": LISTED}, "refuses it: "),
        (PLAIN, {"role": "assistant", "content": LISTED}, "takes no list as the content of message 2"),
        (REFUSING, {"role": "tool", "content": "x"}, "the model's chat template refuses it: no tools"),
        (DEEPSEEK, {"role": "assistant", "content": "since"}, ""),
        (REASONING, {"role": "assistant", "content": "<think>so</think> since"}, ""),
        (REASONING, {"role": "assistant", "content": "", "tool_calls": [{"name": "é"}]}, ""),
        (PARTS, {"role": "assistant", "content": LISTED}, ""),
        (V3_CALLS, {"role": "assistant", "content": "I ask", "tool_calls": CALLS}, ""),
        (V3_CALLS, {"role": "assistant", "tool_calls": CALLS}, ""),
        (DEEPSEEK, {"role": "assistant", "content": "I ask", "tool_calls": CALLS}, "leaves out the tool calls of mess"),
        (
            DEEPSEEK,
            {"role": "assistant", "content": None, "tool_calls": CALLS},
            "leaves out the tool calls of message 2",
        ),
        (DEEPSEEK, {"role": "assistant", "tool_calls": CALLS}, "leaves out the tool calls of message 2"),
        (V3_CALLS, {"role": "assistant", "content": {"a": 1}, "tool_calls": CALLS}, "message 2, of role"),
        (PLAIN.replace("m.content", "m.content | upper"), {"role": "assistant", "content": "since"}, ""),
        (PLAIN.replace("m.content", "m.content | tojson"), {"role": "assistant", "content": 'since "é"'}, ""),
        (
            PLAIN.replace("m.content", "m.content | tojson"),
            {"role": "assistant", "content": LISTED},
            "takes no list as the content of message 2",
        ),
    ],
)
def test_no_message_is_left_out(
    tokenizer: Path, tmp_path: Path, template: str, answer: dict[str, object], problem: str, quick: bool
) -> None:
    """And a look by jinja alone finds, and renders, the same as transformers."""
    from transformers import AutoTokenizer

    set_template(tmp_path, template)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": ask(role="assistant", content="well"), "id": 1}])
    path.write_text(path.read_text() + json.dumps({"messages": ask(**answer)}) + "\n")
    documents_of = Documents(PlainFile(path=path), ChatTemplate(tmp_path, quick=quick))
    if problem and template != REFUSING:
        with pytest.raises(QuantizationError, match=f"a.jsonl:2: .*{re.escape(problem)}"):
            list(documents_of.read())
    elif problem:
        with pytest.raises(ValueError, match=re.escape(problem)):
            documents_of.template.render(ask(**answer))
    else:
        theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(ask(**answer), tokenize=False)
        assert list(documents_of.read())[1][1] == theirs


TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "<é>", "parameters": {"of": None}}}]


WITH_TOOLS = (
    "{% if tools is not none %}{{ tools | length }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("tools", [None, [], TOOLS])
def test_tools_are_what_the_template_makes_of_them(
    tokenizer: Path, tmp_path: Path, tools: list[dict[str, object]] | None, quick: bool
) -> None:
    from transformers import AutoTokenizer

    chat = ask(role="assistant", content="since")
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat, "tools": tools}])
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "used " + WITH_TOOLS + PLAIN}]
    for template, shown in ((PLAIN, False), (WITH_TOOLS + PLAIN, True), (named, True)):
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tools=tools, tokenize=False)
        found = "".join(text for _, text in Documents(PlainFile(path=path), ChatTemplate(tmp_path, quick=quick)).read())
        assert found == theirs and ("<é>" in found) == (shown and tools == TOOLS)


@pytest.mark.parametrize("quick", [False, True])
def test_a_broken_template_is_not_the_transcripts_fault(tokenizer: Path, tmp_path: Path, quick: bool) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": ask(role="assistant", content="well")}])
    for template, problem in (
        ("\n{% for %}", "2 of .* is broken: Expected"),
        ("{{ x | sho }}", "No filter named"),
    ):
        set_template(tmp_path, template)
        with pytest.raises(QuantizationError, match=f"^{re.escape(str(tmp_path))}: line .*{problem}"):
            list(Documents(PlainFile(path=path), ChatTemplate(tmp_path, quick=quick)).read())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(QuantizationError, match=r"^[^:]*chat_template.jinja is no UTF-8 text"):
        list(Documents(PlainFile(path=path), ChatTemplate(tmp_path, quick=quick)).read())


@pytest.mark.parametrize("quick", [False, True])
def test_templates_are_sought_where_transformers_does(tokenizer: Path, tmp_path: Path, quick: bool) -> None:
    from transformers import AutoTokenizer

    set_template(tmp_path, PLAIN)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    chat = ask(role="assistant", content="since")
    beside = tmp_path / "additional_chat_templates"

    def check(rendered: str) -> None:
        assert AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=False) == rendered
        assert ChatTemplate(tmp_path, quick=quick).render(chat) == rendered

    check("user: why?\nassistant: since\n")
    (tmp_path / "chat_template.jinja").write_text("file " + PLAIN)
    check("file user: why?\nassistant: since\n")
    beside.mkdir()
    (beside / "default.jinja").write_text("beside " + PLAIN)
    check("beside user: why?\nassistant: since\n")
    (beside / "default.jinja").rename(beside / "tool_use.jinja")
    check("file user: why?\nassistant: since\n")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(QuantizationError, match="has no chat template, which chat transcripts need"):
        ChatTemplate(tmp_path, quick=quick).render(chat)
    (beside / "tool_use.jinja").unlink()
    del config["chat_template"]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named " + PLAIN}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    check("named user: why?\nassistant: since\n")
    # For processors alone; and of several templates, none that is meant for every chat.
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    for of_tokenizer in ({}, {"chat_template": named[:1]}, {"chat_template": [{"name": "default"}]}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | of_tokenizer))
        with pytest.raises(QuantizationError, match="has no chat template, which chat transcripts need"):
            ChatTemplate(tmp_path, quick=quick).render(chat)
