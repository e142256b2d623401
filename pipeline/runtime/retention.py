"""How long cached blocks are worth keeping, as a request may say of its own: TensorRT-LLM's KV cache retention.

When room is needed, blocks of a lower priority go first, and among equal ones those that were used longest ago. A
priority that was given with a duration counts for so long after the block's last holder let go of it; from then on the
block is like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.runtime.errors import RequestError

LOWEST, DEFAULT, HIGHEST = 0, 35, 100


@dataclass(frozen=True, slots=True)
class Keep:
    """duration: seconds; None: until the room is needed."""

    priority: int = DEFAULT
    duration: float | None = None


ORDINARY = Keep()


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens of a prompt from `start` up to but without `end`; None: to its end."""

    start: int
    end: int | None
    keep: Keep


@dataclass(frozen=True, slots=True)
class Retention:
    """ranges: of the prompt, in order, without overlap. answer: of the blocks that begin with tokens generated.

    Raises RequestError, naming the part of a request.
    """

    ranges: tuple[TokenRange, ...] = ()
    answer: Keep = ORDINARY

    def __post_init__(self) -> None:
        before: int | None = 0
        for part in self.ranges:
            if before is None or part.start < before:
                problem = f"begin at {[one.start for one in self.ranges]}, inside or before another"
                raise RequestError("retention.starts", problem, hint="give ranges in order, without overlap")
            if part.end is not None and part.end <= part.start:
                raise RequestError("retention.ends", f"hold {part.end}, and that range begins at {part.start}")
            _check(part.keep, "retention.priorities", "retention.durations")
            before = part.end
        _check(self.answer, "retention.answer_priority", "retention.answer_duration")

    def of_block(self, first: int, prompt_length: int) -> Keep | None:
        """What is asked for the block whose first token is `first`; None where nothing is. A block that several ranges
        reach into belongs to the one of its first token."""
        if first >= prompt_length:
            return self.answer
        for part in self.ranges:
            if part.start <= first and (part.end is None or first < part.end):
                return part.keep
        return None


def _check(keep: Keep, priority: str, duration: str) -> None:
    if not LOWEST <= keep.priority <= HIGHEST:
        raise RequestError(priority, f"hold {keep.priority}", hint=f"{LOWEST} to {HIGHEST}; {DEFAULT} is ordinary")
    if keep.duration is not None and keep.duration < 0:
        raise RequestError(duration, f"hold {keep.duration * 1e3:g} ms", hint="-1 for no limit")
