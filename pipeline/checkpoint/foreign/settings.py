"""A quantization_config, whose every key that says what numbers mean is read, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import CheckpointError


class Settings:
    """`values` from the file `origin`, at `prefix` in it. A null counts as absent. Methods raise CheckpointError."""

    def __init__(self, values: Mapping[str, Any], origin: str, prefix: str = "quantization_config.") -> None:
        self.values, self.origin, self.prefix = values, origin, prefix

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.origin}: {self.prefix}{key} {problem}",
            hint="take the model's 16-bit weights and quantize those, or another quantization of it",
        )

    def require(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """One of `allowed`; text in either case."""
        value = self.values.get(key)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if isinstance(value, bool) or value not in allowed:
            raise self.fail(key, f"is {_spell(value)}; read are {', '.join(map(str, allowed))}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {_spell(value)}")
        return value

    def refuse(self, key: str, what: str) -> None:
        if self.values.get(key):
            raise self.fail(key, f"{what}, which is not read")

    def section(self, key: str) -> Settings | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(key, f"must be a mapping, not {_spell(value)}")
        return Settings(value, self.origin, f"{self.prefix}{key}.")

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.fail(key, f"must be a list of names, not {_spell(value)}")
        return value

    def group_size(self, base: str, columns: int, default: int | None = None) -> int:
        """Of a linear with so many inputs; -1 stands for all of them."""
        value = self.values.get("group_size")
        value = default if value is None else value
        if value == -1:
            return columns
        if type(value) is not int or value < 1:
            raise self.fail("group_size", f"must be -1 or a positive integer, not {_spell(value)}")
        if columns % value:
            raise self.fail("group_size", f"{value} does not divide the {columns} inputs of {base}")
        return value


def _spell(value: Any) -> str:
    """A value of a hostile file, for a message."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "an integer of more than 30 digits"
    return text if len(text) <= 60 else text[:57] + "..."
