"""The layout of what travels to an expert's rank: one message for each token and rank.

row of the token | its scale (FP8 only) | its k experts, int32 | their weights, fp32 | filled up to 16 bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plugins.operation import divide_up

PAYLOADS = ("model", "fp8")
ALIGNMENT = 16  # of a message: the widest load
WIDEST = 448.0  # of FP8 E4M3
# A row's greatest element is taken to be no less, so that its scale can be divided by.
SMALLEST = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """hidden: elements of a row. element_bytes: of each, as it travels. top_k: experts of a token."""

    hidden: int
    element_bytes: int
    scaled: bool
    top_k: int

    @property
    def row_bytes(self) -> int:
        return divide_up(self.hidden * self.element_bytes, 4) * 4

    @property
    def experts_at(self) -> int:
        return self.row_bytes + 4 * self.scaled

    @property
    def weights_at(self) -> int:
        return self.experts_at + 4 * self.top_k

    @property
    def bytes(self) -> int:
        return divide_up(self.weights_at + 4 * self.top_k, ALIGNMENT) * ALIGNMENT

    def constants(self) -> dict[str, Any]:
        """For the kernels, which count in elements and in words of 4 bytes."""
        return {
            "HIDDEN": self.hidden,
            "TOP_K": self.top_k,
            "FP8": self.scaled,
            "STRIDE": self.bytes // self.element_bytes,
            "WORDS": self.bytes // 4,
            "EXPERTS_AT": self.experts_at // 4,
            "WEIGHTS_AT": self.weights_at // 4,
        }
