"""What the kernels and exchanges compute, in plain torch: the same messages, in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.moe_all_to_all.message import SMALLEST, WIDEST, Message
from plugins.transport import Transport, exchange_rows

if TYPE_CHECKING:
    from plugins.moe_all_to_all.operation import MoeCombine, MoeDispatch


def dispatch(
    op: MoeDispatch, transport: Transport[Tensor], x: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    """rows, row_ids, row_weights, places, counts. See MoeDispatch."""
    tokens, places, goes = _sort(op, ids)
    fp8, one = op.payload == "fp8", [1] * op.ranks
    message = Message(hidden=op.hidden, element_bytes=1 if fp8 else x.element_size(), scaled=fp8, top_k=op.top_k)
    comes = torch.zeros_like(goes)
    exchange_rows(transport, "counts", _flat(goes), _flat(comes), goes=one, comes=one, row_bytes=4, most=op.ranks)
    most = op.ranks * len(x)
    sent = _pack(message, x, ids, weights)[tokens]
    came = sent.new_empty((int(comes.sum()), message.bytes))
    exchange_rows(
        transport,
        "dispatch",
        _flat(sent),
        _flat(came),
        goes=goes.tolist(),
        comes=comes.tolist(),
        row_bytes=message.bytes,
        most=most,
    )
    rows, row_ids, row_weights = _unpack(message, came, x.dtype)
    rest = (0, 0, 0, most - len(came))
    filled = F.pad(rows, rest), F.pad(row_ids, rest, value=-1), F.pad(row_weights, rest)
    return *filled, places, torch.stack([goes, comes])


def combine(op: MoeCombine, transport: Transport[Tensor], rows: Tensor, places: Tensor, counts: Tensor) -> Tensor:
    """[T, hidden]. See MoeCombine."""
    went, came = counts.tolist()
    returned = rows.new_empty((sum(went), op.hidden))
    exchange_rows(
        transport,
        "combine",
        _flat(rows[: sum(came)].contiguous()),
        _flat(returned),
        goes=came,
        comes=went,
        row_bytes=op.hidden * rows.element_size(),
        most=len(places) * op.most_ranks,
    )
    padded = F.pad(returned.float(), (0, 0, 0, 1))  # place -1 is a row of zeros
    total = padded.new_zeros((len(places), op.hidden))
    for column in places.long().unbind(1):
        total += padded[column]
    return total.to(rows.dtype)


def _sort(op: MoeDispatch, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The token of each message, by rank and then by token; places [T, k]; messages to each rank."""
    valid = (ids >= 0) & (ids < op.experts)
    owner = torch.where(valid, ids // (op.experts // op.ranks), -1)
    again = (owner.unsqueeze(2) == owner.unsqueeze(1)).tril(-1).any(2)  # at an earlier expert of the token
    token, choice = (valid & ~again).nonzero(as_tuple=True)
    order = torch.argsort(owner[token, choice], stable=True)
    token, choice = token[order], choice[order]
    places = torch.full_like(ids, -1)
    places[token, choice] = torch.arange(len(token), dtype=ids.dtype, device=ids.device)
    return token, places, torch.bincount(owner[token, choice], minlength=op.ranks).to(torch.int32)


def _pack(message: Message, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Each token's message, [T, bytes] uint8."""
    if message.scaled:
        wide = x.float()
        scale = wide.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / WIDEST
        x = (wide / scale).clamp(-WIDEST, WIDEST).to(torch.float8_e4m3fn)
        parts = [_pad(_view(x), message.row_bytes), _view(scale), _view(ids), _view(weights)]
    else:
        parts = [_pad(_view(x), message.row_bytes), _view(ids), _view(weights)]
    return _pad(torch.cat(parts, 1), message.bytes)


def _unpack(message: Message, came: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their experts and weights."""
    kind = torch.float8_e4m3fn if message.scaled else dtype
    row = _read(came, 0, message.hidden * message.element_bytes, kind)
    ids = _read(came, message.experts_at, message.weights_at, torch.int32)
    weights = _read(came, message.weights_at, message.weights_at + 4 * message.top_k, torch.float32)
    if message.scaled:
        scale = _read(came, message.row_bytes, message.experts_at, torch.float32)
        row = (row.float() * scale).to(dtype)
    return row, ids, weights


def _flat(tensor: Tensor) -> Tensor:
    """The same memory, as bytes."""
    return tensor.view(-1).view(torch.uint8)


def _view(rows: Tensor) -> Tensor:
    """[T, bytes]."""
    return _flat(rows.contiguous()).view(len(rows), rows.shape[1] * rows.element_size())


def _read(rows: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Bytes [start, end) of each row, as numbers: [T, n]."""
    part = rows[:, start:end].contiguous()
    return part.view(-1).view(dtype).view(len(rows), (end - start) // dtype.itemsize)


def _pad(rows: Tensor, width: int) -> Tensor:
    return F.pad(rows, (0, width - rows.shape[1]))
