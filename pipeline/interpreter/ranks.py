"""One rank of a parallel model in the interpreter: a process that runs its network, with the others beside it.

Tensor and expert parallelism are in the network; what pipeline stages hand on is not, and is sent here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pipeline.network.inputs import HIDDEN_STATES, HIDDEN_STATES_OUT, SLOT_IDS

if TYPE_CHECKING:
    from pipeline.interpreter.interpreter import Interpreter
    from pipeline.sharding import Rank


def join_ranks(rank: Rank, address: str) -> None:
    """Makes this process a rank, once: waits for all others. `address` is torch.distributed's: "tcp://host:port" of
    rank 0, or "file:///path" of a file that is not there yet."""
    dist.init_process_group("gloo", init_method=address, rank=rank.index, world_size=rank.parallel.world)


class RankInterpreter:
    """`interpreter` has the network of `rank`; every rank must run the same steps in the same order."""

    def __init__(self, interpreter: Interpreter, rank: Rank) -> None:
        self.interpreter, self.rank = interpreter, rank
        specs = {spec.name: spec for spec in interpreter.program.inputs}
        self._wanted = specs.keys() - {HIDDEN_STATES}
        self._hidden = specs.get(HIDDEN_STATES)

    def run(self, feeds: Mapping[str, torch.Tensor], *, taps: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """As Interpreter.run, of the whole model's step: inputs that other stages take are left out, hidden states
        come from the stage before and go to the one after. Logits are in the outputs of the last stage, on each of its
        ranks."""
        own = {name: feeds[name] for name in self._wanted if name in feeds}
        if self._hidden is not None:
            shape = len(feeds[SLOT_IDS.name]), self._hidden.shape[1]
            own[HIDDEN_STATES] = take_hidden(self.rank, shape, self.interpreter.numerics.held(self._hidden.dtype))
        outputs = self.interpreter.run(own, taps=taps)
        if HIDDEN_STATES_OUT in outputs:
            hand_on(self.rank, outputs[HIDDEN_STATES_OUT])
        return outputs


def hand_on(rank: Rank, hidden: torch.Tensor) -> None:
    """Sends hidden states [T, H] to the same tensor rank of the next pipeline stage, which is taking them."""
    dist.send(_bytes(hidden.contiguous()), rank.index + rank.parallel.tensor)


def take_hidden(rank: Rank, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Hidden states [T, H] that the stage before hands on."""
    hidden = torch.empty(shape, dtype=dtype)
    dist.recv(_bytes(hidden), rank.index - rank.parallel.tensor)
    return hidden


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; gloo does not know every type."""
    return tensor.view(-1).view(torch.uint8)
