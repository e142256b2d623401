"""What reaches a layer's linears, kept small: mean |x| per channel, and a bounded sample of rows for the loss.

Which rows are kept is decided by a seeded priority of each token, not by the order in which they come: the same rows
whatever the batch, and for an expert a fair sample of the tokens that the router really sent to it.

Shapes: T tokens of all samples together, I input features, E routed experts, n tokens of a batch.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pipeline.quantization.coverage import Spread
from pipeline.quantization.kv_cache import CacheRange
from pipeline.quantization.moments import ExpertInputs, MomentSum

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from torch import Tensor, nn

# On SmolLM2-135M, 64, 256 and 512 gave the same perplexity within its noise; clipping wants more than a group's size.
ROWS = 256
# Rows kept for all experts of a layer together, and for one at least: 64 rows of a 256-expert, 7168-wide layer are
# already half a gigabyte.
EXPERT_ROWS, FEWEST_EXPERT_ROWS = 16384, 64
EXPERTS = "mlp.experts"
NONE = torch.iinfo(torch.int64).max  # the priority of a place that no row has taken


@dataclass(frozen=True, slots=True)
class Inputs:
    """`mean_abs` and `max_abs` float32 [I] over all `tokens`; `rows` float32 [at most ROWS, I] of them."""

    mean_abs: Tensor
    max_abs: Tensor
    rows: Tensor
    tokens: int


@dataclass(frozen=True, slots=True)
class Captured:
    """A layer's inputs by HF module name; for a routed layer also each expert's own share of its input.

    Of the modules that they were wanted of: `moments` float32 [I, I], and the experts' whole input.
    """

    inputs: dict[str, Inputs]
    experts: tuple[Inputs, ...] = ()
    moments: dict[str, Tensor] = field(default_factory=dict)
    expert_inputs: ExpertInputs | None = None
    cache_amax: float = 0.0  # of all that a cache would hold
    coverage: dict[str, dict[str, float]] = field(default_factory=dict)  # see coverage.py


class Sampler:
    """Collects one input. `priorities` int64 [T]: the tokens with the lowest ones are kept."""

    def __init__(self, priorities: Tensor, limit: int = ROWS) -> None:
        self.priorities, self.limit = priorities, limit
        self.tokens = 0
        # Made once: what is made anew for each batch and stays scatters over the heap, which is not given back then.
        self._sums: Tensor | None = None
        self._peaks: Tensor | None = None
        self._rows: Tensor | None = None  # those kept, and of each its priority
        self._kept = torch.full((min(limit, priorities.numel()),), NONE, dtype=torch.int64)

    def add(self, x: Tensor, positions: Tensor) -> None:
        """`x` [n, I] at token positions [n] (0 ≤ position < T)."""
        self.tokens += x.shape[0]
        magnitudes = x.abs()
        if self._sums is None or self._peaks is None:
            self._sums, self._peaks = torch.zeros(x.shape[1], dtype=torch.float64), torch.zeros(x.shape[1])
        self._sums += magnitudes.sum(0, dtype=torch.float64)
        torch.maximum(self._peaks, magnitudes.amax(0).float(), out=self._peaks)
        self._keep(x, self.priorities[positions])

    def _keep(self, x: Tensor, priorities: Tensor) -> None:
        """Writes the rows of `x` that are among the first over the last of those that are there."""
        if self._rows is None:
            self._rows = torch.empty(self._kept.numel(), x.shape[1])
        better = priorities <= torch.cat([self._kept, priorities]).kthvalue(self._kept.numel()).values
        places = self._kept.argsort(descending=True)[: int(better.sum())]
        self._rows[places] = x[better].float()
        self._kept[places] = priorities[better]

    def finish(self) -> Inputs:
        """Mean and maximum are rounded to bfloat16's 8 bits: enough for a scale, and the same on every number of
        threads."""
        if self._sums is None or self._peaks is None or self._rows is None:
            return Inputs(torch.empty(0), torch.empty(0), torch.empty(0, 0), 0)
        mean, peaks = (self._sums / self.tokens).bfloat16().float(), self._peaks.bfloat16().float()
        rows, self._rows = self._rows[self._kept.argsort()[: self.tokens]], None
        return Inputs(mean, peaks, rows, self.tokens)


def draw_priorities(tokens: int, seed: int) -> Tensor:
    """A permutation of 0 … tokens-1."""
    return torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))


class Capture:
    """Watches the inputs of the named modules of one HF decoder layer while batches go through it.

    `num_experts` is 0 for a layer without routed experts; else "mlp.experts" may be among `names`, and what it is given
    is also kept expert by expert, as the router chose. `moments`: those whose second moments are wanted; the experts'
    whole input goes to the file `spill` then, and its second moments are left to whoever reads it. `sample_length`, in
    tokens: coverage is judged by samples of it.
    """

    def __init__(
        self,
        names: Iterable[str],
        priorities: Tensor,
        num_experts: int = 0,
        moments: Collection[str] = (),
        spill: Path | None = None,
        sample_length: int | None = None,
    ) -> None:
        self.samplers = {name: Sampler(priorities) for name in names}
        limit = min(ROWS, max(FEWEST_EXPERT_ROWS, EXPERT_ROWS // max(num_experts, 1)))
        experts = num_experts if EXPERTS in self.samplers else 0
        self.experts = [Sampler(priorities, limit) for _ in range(experts)]
        self.moments = {name: MomentSum() for name in moments if name != EXPERTS or not experts}
        self.expert_inputs = ExpertInputs(spill) if spill is not None and experts and EXPERTS in moments else None
        self.spreads = {name: Spread(sample_length) for name in self.samplers} if sample_length else {}
        self.cache = CacheRange()
        self._start = 0

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        handles = [
            module.get_submodule(name).register_forward_pre_hook(self._hook(name, sampler))
            for name, sampler in self.samplers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if self.expert_inputs is not None:
                self.expert_inputs.close()

    def start_batch(self, first_token: int) -> None:
        """The batch that comes next begins at this token."""
        self._start = first_token

    def finish(self) -> Captured:
        inputs = {name: sampler.finish() for name, sampler in self.samplers.items()}
        experts = tuple(sampler.finish() for sampler in self.experts)
        moments = {name: total.finish() for name, total in self.moments.items()}
        figures = {name: spread.finish() for name, spread in self.spreads.items()}
        coverage = {name: row for name, row in figures.items() if row is not None}
        return Captured(inputs, experts, moments, self.expert_inputs, self.cache.amax, coverage)

    def _hook(self, name: str, sampler: Sampler) -> Any:
        def see(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0].reshape(-1, arguments[0].shape[-1])
            positions = self._start + torch.arange(x.shape[0])
            sampler.add(x, positions)
            if name in self.spreads:
                self.spreads[name].add(x, positions)
            if name in self.moments:
                self.moments[name].add(x)
            if name == EXPERTS:
                self._add_to_experts(x, positions, chosen=arguments[1])

        return see

    def _add_to_experts(self, x: Tensor, positions: Tensor, chosen: Tensor) -> None:
        """`chosen` int64 [n, top_k]: the experts of each token, as DeepseekV2Experts.forward receives them."""
        if self.expert_inputs is not None:
            self.expert_inputs.add(x, chosen)
        for expert, sampler in enumerate(self.experts):
            rows = (chosen == expert).any(dim=1).nonzero().squeeze(1)
            if rows.numel():
                sampler.add(x[rows], positions[rows])
