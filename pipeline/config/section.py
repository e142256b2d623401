"""What all sections of a config share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Ratio = Annotated[float, Field(gt=0)]
EMPTY_PATH = "name a file or folder, or leave the key out where it has a default; the current folder is written ."


def _refuse_nowhere(value: object) -> object:
    """Path("") would be the current folder, which nobody means who writes nothing."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise PydanticCustomError("empty_path", "is empty", {"hint": EMPTY_PATH})
    return value


FilePath = Annotated[Path, BeforeValidator(_refuse_nowhere)]


class Section(BaseModel):
    """Frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def changes(self, key: str) -> bool:
        """Whether a setting is not at its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)
