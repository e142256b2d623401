"""pydantic's validation errors as one ConfigError: file and line of the value, its key, and the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pipeline.config.document import Located, name_kind
from pipeline.config.schema import Config
from pipeline.errors import ConfigError

# What pydantic's commoner messages say, in the words of a config file. Filled with the error's `ctx` and `input`.
_MESSAGES = {
    "missing": "is missing",
    "extra_forbidden": "is not a setting",
    "literal_error": "must be {expected}, not {input}",
    "int_type": "must be a whole number, not {input}",
    "float_type": "must be a number, not {input}",
    "bool_type": "must be true or false, not {input}",
    "string_type": "must be text, not {input}",
    "path_type": "must be a path, not {input}",
    "tuple_type": "must be a list, not {input}",
    "model_type": "must be a map of settings, not {input}",
    "greater_than_equal": "must be at least {ge}, not {input}",
    "greater_than": "must be more than {gt}, not {input}",
    "less_than_equal": "must be at most {le}, not {input}",
    "finite_number": "must be a finite number",
    "too_short": "must have at least {min_length} item(s)",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must match {pattern}, not {input}",
}

# The scalars for which text is no substitute, and the kinds of YAML that are one.
_SCALARS = {"int_type": ("int",), "float_type": ("int", "float"), "bool_type": ("bool",)}
_NOT_FINITE = ("nan", "inf", "infinity")


# What methods are called elsewhere: by the bits of weights and activations, by TensorRT-LLM's names, by the format.
_NICKNAMES = {
    "w4a8": "awq_fp8",
    "w4a8_awq": "awq_fp8",
    "w4a16": "awq",
    "w4a16_awq": "awq",
    "w4a16_gptq": "gptq",
    "int4_awq": "awq",
    "int4": "awq",
    "w8a16": "int8",
    "w8a8": "smoothquant",
    "int8_sq": "smoothquant",
}


def explain(error: ValidationError, tree: Located) -> ConfigError:
    """`tree` is the composed document that was refused."""
    problems = []
    items = error.errors(include_url=False)
    for item in items:
        if item["type"] == "too_short" and any(_lies_in(other["loc"], item["loc"]) for other in items):
            continue  # pydantic leaves out of a list what is wrong in it
        path = tuple(item["loc"])
        key = ".".join(map(str, path))
        text = f"{_find_origin(tree, path)}: {key}: {_describe(item)}" if key else _describe(item)
        problems.append((text, _suggest(item, path)))
    if len(problems) == 1:
        return ConfigError(problems[0][0], hint=problems[0][1])
    return ConfigError("\n".join(f"{text} ({hint})" if hint else text for text, hint in problems))


def _lies_in(path: tuple[str | int, ...], above: tuple[str | int, ...]) -> bool:
    return len(path) > len(above) and path[: len(above)] == above


def _find_origin(tree: Located, path: tuple[str | int, ...]) -> str:
    """The origin of the value at `path`, or of the innermost map or list around it that was written."""
    for part in path:
        try:
            tree = tree.value[part]
        except (KeyError, IndexError, TypeError):
            break
    return str(tree.origin)


def _describe(item: Mapping[str, Any]) -> str:
    values = {**item.get("ctx", {}), "input": _show(item.get("input"))}
    template = _MESSAGES.get(item["type"])
    return template.format(**values) if template else str(item["msg"]).removeprefix("Value error, ")


def _show(value: object) -> str:
    text = (
        {True: "true", False: "false", None: "an empty value"}.get(value)
        if isinstance(value, (bool, type(None)))
        else None
    )
    text = text or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _suggest(item: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
    if item["type"] == "extra_forbidden":
        return _suggest_key(path)
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        choices = [choice.strip().strip("'") for choice in item["ctx"]["expected"].replace(" or ", ",").split(",")]
        meant = _NICKNAMES.get(item["input"].lower()) if item["loc"][-1] == "method" else None
        near = [meant] if meant else difflib.get_close_matches(item["input"], choices, n=1)
        return f"did you mean {near[0]}?" if near else ""
    if item["type"] in _SCALARS and isinstance(item["input"], str):
        return _suggest_scalar(item)
    if item["type"] == "string_pattern_mismatch" and path == ("name",):
        return "set name: to letters, digits, '.', '_' and '-'; where it is left out the file's own name is taken"
    if item["type"] == "model_type" and item["input"] is None:
        return f"{item['loc'][-1]} is empty: give it settings or leave it out"
    return str(item.get("ctx", {}).get("hint", ""))


def _suggest_scalar(item: Mapping[str, Any]) -> str:
    """For text where there is to be a number or a truth value."""
    text = item["input"]
    if name_kind(text) in _SCALARS[item["type"]]:
        return f"write {item['loc'][-1]} without quotes"
    if item["type"] == "bool_type":
        return "only true and false are truth values"
    if text.lower().lstrip("+-.") in _NOT_FINITE:
        return "numbers are finite; what can be turned off is off with null"
    example = "0.05 or 1e-4" if item["type"] == "float_type" else "64"
    return f"write {item['loc'][-1]} in digits, as {example}"


def _suggest_key(path: tuple[str | int, ...]) -> str:
    *above, wrong = path
    siblings = _list_fields(above)
    if near := difflib.get_close_matches(str(wrong), siblings, n=1):
        return f"did you mean {'.'.join(map(str, [*above, near[0]]))}?"
    everywhere = {key: ".".join(key) for key in _list_keys(Config)}
    if found := [key for key in everywhere if key[-1] == wrong]:
        nearest = [everywhere[key] for key in found if len(key) == min(map(len, found))]
        return f"did you mean {' or '.join(nearest)}?"
    return f"known here: {', '.join(siblings)}"


def _list_fields(path: list[str | int]) -> list[str]:
    """The keys that the section at `path` takes."""
    section: type[BaseModel] = Config
    for part in path:
        if isinstance(part, str):
            section = next(iter(list_sections(section.model_fields[part].annotation)))
    return list(section.model_fields)


def _list_keys(section: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for name, info in section.model_fields.items():
        yield (name,)
        for child in list_sections(info.annotation):
            yield from ((name, *rest) for rest in _list_keys(child))


def list_sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's annotation holds: itself, or in a tuple or union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from list_sections(argument)
