"""One sequence on its way: what the scheduler and the batcher know of it."""

from __future__ import annotations

from typing import Any

from pipeline.runtime.blocks import Hash, hash_blocks
from pipeline.runtime.history import History
from pipeline.runtime.request import Request

Rank = tuple[int, int, int]


class Sequence:
    """A prompt and its answer. `handle` is whoever is told of it, which only the batcher looks at.

    tokens: both. table: its blocks, in order. cached: how many of the tokens these hold. published: how many of the
    blocks can be found by others. hashes: of the full blocks, as far as known.
    width: sequences that this one becomes once its prompt is computed.
    order: place in the order of arrival; index: place among its request's sequences. last_step: when it last ran.
    promised: contents that others wait for this one to compute. given, reused: blocks it got, new or found, in all.
    """

    __slots__ = (
        "arrival",
        "cached",
        "given",
        "handle",
        "hashes",
        "history",
        "index",
        "is_running",
        "last_step",
        "order",
        "promised",
        "prompt_length",
        "published",
        "request",
        "reused",
        "table",
        "tokens",
        "width",
    )

    def __init__(
        self, request: Request, *, order: int, arrival: float, seed: int = 0, index: int = 0, handle: Any = None
    ) -> None:
        self.request, self.order, self.arrival, self.handle, self.index = request, order, arrival, handle, index
        self.tokens = list(request.input_ids)
        self.prompt_length = len(self.tokens)
        self.history = History(
            request.sampling,
            self.tokens,
            prompt_length=self.prompt_length,
            seed=seed,
            index=index,
            end_id=request.end_id,
        )
        self.width = request.num_return_sequences
        self.table: list[int] = []
        self.hashes: list[Hash] = []
        self.promised: list[Hash] = []
        self.cached = self.published = self.given = self.reused = 0
        self.last_step = -1
        self.is_running = False

    def fork(self, index: int) -> Sequence:
        """Another sequence of the same request, with the same prompt in the same blocks, which the caller holds."""
        other = Sequence(
            self.request,
            order=self.order,
            arrival=self.arrival,
            seed=self.history.seed,
            index=index,
            handle=self.handle,
        )
        other.table, other.hashes = list(self.table), list(self.hashes)
        other.cached, other.published, other.last_step = self.cached, self.published, self.last_step
        other.width, other.is_running = 1, self.is_running
        return other

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be chosen; 1 while generating."""
        return len(self.tokens) - self.cached

    @property
    def longest(self) -> int:
        """Tokens that the cache must hold in the end: the last one generated is not computed."""
        return self.prompt_length + self.request.max_tokens - 1

    @property
    def reads_shared(self) -> bool:
        """Whether others' blocks may stand for the beginning: not while the logits of every row are wanted."""
        return not self.request.wants_context or len(self.tokens) > self.prompt_length

    def rank(self, now: float, ageing: float | None) -> Rank:
        """Who comes first: the higher class, then who came earlier. A sequence rises by one class for every `ageing`
        seconds since its arrival, so that none waits forever."""
        level = int(self.request.priority)
        if ageing is not None and level:
            level = max(0, level - int((now - self.arrival) / ageing))
        return level, self.order, self.index

    def full_hashes(self, block_size: int) -> list[Hash]:
        """Hashes of all full blocks of the tokens."""
        if len(self.hashes) < len(self.tokens) // block_size:
            self.hashes += hash_blocks(self.tokens, block_size, self.hashes, self.request.cache_salt)
        return self.hashes

    def drop(self) -> None:
        """Forgets its blocks, which the caller releases: everything is to be computed again."""
        self.table, self.promised = [], []
        self.cached = self.published = 0
