"""A decoder layer's weights for transformers' module, whose routed experts are read one at a time.

A DeepSeek-V3 layer is 46 GB in float32, of which the routed experts are all but one. So an expert's matrices are made
when they are asked for and held by nobody. transformers' own code runs on them: its module of experts indexes two
stacked parameters, [E, 2I, H] and [E, H, I], by expert, and nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.layouts import Mapping as Tensor

EXPERTS = "mlp.experts"
# transformers 5's stacked parameters, and the HF linears whose rows each has, one below the other.
STACKS: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class LayerState(Mapping[str, "torch.Tensor"]):
    """Weights by HF name relative to the layer. Those of routed experts are read each time that they are asked for."""

    def __init__(
        self, prefix: str, mappings: Sequence[Tensor], read: Callable[[Tensor], Sequence[torch.Tensor]]
    ) -> None:
        """`read` gives the weights of a mapping's sources."""
        self._read = read
        self._held: dict[str, torch.Tensor] = {}
        self._lazy: dict[str, tuple[Tensor, int]] = {}
        for mapping in mappings:
            names = [name.removeprefix(prefix) for name in mapping.sources]
            if mapping.role == "experts":
                self._lazy |= {name: (mapping, place) for place, name in enumerate(names)}
            else:
                self._held.update(zip(names, read(mapping), strict=True))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._held:
            return self._held[name]
        mapping, place = self._lazy[name]
        return self._read(mapping)[place]

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self._held or name in self._lazy

    def __iter__(self) -> Iterator[str]:
        yield from self._held
        yield from self._lazy

    def __len__(self) -> int:
        return len(self._held) + len(self._lazy)


class ExpertStack:
    """Indexed by expert as a stacked parameter [E, rows, columns] is: a new tensor each time, made of `state`."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], stack: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """`stack`: a key of STACKS. Raises CheckpointError where a weight is missing; at the index, for its shape."""
        self.state, self.stack, self.shape, self.dtype = state, stack, shape, dtype
        for expert in range(shape[0]):
            for name in self.names(expert):
                if name not in state:
                    raise CheckpointError(f"{name} is missing; transformers' module wants it")

    def names(self, expert: int) -> list[str]:
        return [f"{EXPERTS}.{expert}.{part}.weight" for part in STACKS[self.stack]]

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        import torch

        whole = torch.empty(self.shape[1:], dtype=self.dtype)
        self.fill(int(expert), whole)
        return whole

    def fill(self, expert: int, whole: torch.Tensor) -> None:
        """Writes the expert's matrix [rows, columns] into `whole`."""
        names = self.names(expert)
        for name, rows in zip(names, whole.chunk(len(names)), strict=True):
            weight = self.state[name]
            if weight.shape != rows.shape:
                raise CheckpointError(
                    f"{name} has shape {list(weight.shape)}; transformers' module wants {list(rows.shape)}"
                )
            rows.copy_(weight)

    def stacked(self) -> torch.Tensor:
        """All of them, [E, rows, columns]."""
        import torch

        whole = torch.empty(self.shape, dtype=self.dtype)
        for expert in range(self.shape[0]):
            self.fill(expert, whole[expert])
        return whole
