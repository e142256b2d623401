"""Operations that exchange rows, on one GPU: a rank of a group gets back what it sends, so that its kernels can be held
against the reference, and timed without the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plugins.driver import open_driver
from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch
from plugins.moe_all_to_all.reference import combine, dispatch
from plugins.operation import Exchange, Operation
from plugins.tensorrt_plugin import Locate
from plugins.transport import Traffic


class Loopback:
    """The reference's transport. See transport.Transport."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks, self.traffic = 0, ranks, Traffic()

    def exchange(
        self, source: torch.Tensor, target: torch.Tensor, sends: Sequence[int], receives: Sequence[int], stream: int
    ) -> None:
        target[: sum(receives)] = source[: sum(sends)]


class LocalDispatch(MoeDispatch):
    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        return dispatch(self, Loopback(self.ranks), *inputs)


class LocalCombine(MoeCombine):
    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        return (combine(self, Loopback(self.ranks), *inputs),)


LOCAL: dict[str, type[Operation]] = {"moe_dispatch": LocalDispatch, "moe_combine": LocalCombine}


def keep_local(operation: Operation) -> Operation:
    """The same with the same kernels, whose reference needs no other ranks."""
    return LOCAL[operation.NAME](**operation.attributes()) if operation.EXCHANGES else operation


def loop_back(step: Exchange, locate: Locate, stream: int) -> None:
    """A GPU's exchange, in place of plugins.tensorrt_plugin.exchange_over_nccl."""
    driver, rows = open_driver(), step.ranks
    if step.counts is not None:
        rows = sum(driver.read_integers(locate(step.counts), step.ranks, stream))
    driver.copy(locate(step.target), locate(step.source), rows * step.row_bytes, stream)


def leave_out(step: Exchange, locate: Locate, stream: int) -> None:
    """For timing kernels: what an earlier run exchanged is still there."""


def draw_tokens(operation: Operation, tokens: int, device: str) -> list[torch.Tensor]:
    """Inputs of a step of so many own tokens, their experts drawn evenly."""
    a = operation.attributes()
    generator = torch.Generator(device).manual_seed(1)
    scores = torch.rand((tokens, a["experts"]), generator=generator, device=device)
    weights, ids = scores.topk(a["top_k"], 1)
    x = torch.randn((tokens, a["hidden"]), generator=generator, device=device).to(getattr(torch, a["dtype"]))
    inputs = [x, ids.to(torch.int32), weights]
    if isinstance(operation, MoeDispatch):
        return inputs
    rows, _, _, places, counts = LocalDispatch(**a, payload="model").compute(*inputs)
    return [rows, places, counts]


def clear_unwritten(operation: Operation, outputs: list[torch.Tensor]) -> None:
    """Zeros where dispatch leaves memory as it was."""
    if isinstance(operation, MoeDispatch):
        outputs[0][int(outputs[4][1].sum()) :] = 0


def count_rows(operation: Operation, inputs: list[torch.Tensor]) -> int:
    """Bytes that the kernels must read and write: each message written and read, and its row written; or each row that
    came back, once."""
    messages = operation.compute(*inputs)[4][0] if isinstance(operation, MoeDispatch) else inputs[2][0]
    rows, tokens = int(messages.sum()), len(inputs[0]) if isinstance(operation, MoeDispatch) else len(inputs[1])
    width = int(operation.attributes()["hidden"]) * inputs[0].element_size()
    if isinstance(operation, MoeDispatch):
        return tokens * width + rows * (2 * operation.message.bytes + width)
    return rows * width + tokens * width
