"""What all sections of a config share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Ratio = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def changes(self, key: str) -> bool:
        """Whether a setting is not at its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)
