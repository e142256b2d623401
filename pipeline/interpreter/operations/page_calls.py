"""Calls of the kernels in C that attend over the blocks of a cache. B sequences, N heads, Q queries of the longest
chunk, K keys, D head size, T packed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.interpreter.native import Call, count_threads
from pipeline.interpreter.native.kernel import Empty

CHUNK_WIDTH, CHUNK_ROWS = 32, 64  # as in native/chunks.c: columns in multiples, and rows at a time
PART = 8  # as in native/attention.c: heads that a thread computes at a time
FEWEST_SHARED = 1 << 15  # multiplications, from which on another thread helps: among other calls it is awake


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What an attention is over. size: rows of a block; width: of a key; v_width: of a value, the first in a row of
    the values' pool. bias_rows: how many of the bias, next to each other, a query has, which say the same."""

    held: torch.dtype
    heads: int
    kv_heads: int
    size: int
    width: int
    v_width: int
    bias_rows: int = 1

    def plan_single(
        self, empty: Empty, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, bias: Tensor
    ) -> Call | None:
        """One row of each sequence: q [B, N, …, D] → [B, N, v_width]. bias [B or 1, 1, 1 or bias_rows, K]."""
        batch, columns = table.shape
        length = columns * self.size
        bias = bias[:, :, :1].expand(batch, 1, 1, length)
        if bias.stride(3) != 1 or not all(tensor.is_contiguous() for tensor in (q, keys, values, table)):
            return None
        if len(values) != len(keys):
            return None
        y = empty((batch, self.heads, self.v_width), dtype=self.held)
        threads = count_threads(batch * self.heads * length * self.width, FEWEST_SHARED)
        return Call(
            kernel="attend_pages",
            arguments=(
                self.held is torch.bfloat16,
                q.data_ptr(),
                keys.data_ptr(),
                values.data_ptr(),
                table.data_ptr(),
                bias.data_ptr(),
                y.data_ptr(),
                len(keys),
                batch,
                self.heads,
                self.kv_heads,
                columns,
                self.size,
                self.width,
                self.v_width,
                values.shape[3],
                bias.stride(0),
            ),
            outputs=y,
            scratch=8 * threads * (length + min(PART, self.heads // self.kv_heads) * (length + self.v_width)),
            threads=threads,
            refusal=f"the block table names blocks that are none of the {len(keys)} of the cache",
        )

    def plan_chunks(
        self,
        empty: Empty,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        bias: Tensor,
        pad: Tensor,
        unpad: Tensor,
    ) -> Call | None:
        """Several rows of a sequence: packed q [T, N, D] → [T, N * v_width]; where products are of fp32: where they are
        of bf16, torch's are as fast. bias [B or 1, 1, 1 or Q * …, K]."""
        (batch, columns), rows, tensors = table.shape, len(q), (q, keys, values, table, bias, pad, unpad)
        group, length, queries = self.heads // self.kv_heads, columns * self.size, pad.numel() // max(batch, 1)
        fits = self.held is torch.float32 and self.size % CHUNK_WIDTH == 0 and self.v_width % CHUNK_WIDTH == 0
        if not fits or not all(tensor.is_contiguous() for tensor in tensors):
            return None
        if {q.dtype, bias.dtype} != {self.held} or {pad.dtype, unpad.dtype} != {torch.int32}:
            return None
        biased = len(bias) in (1, batch) and bias.shape[2] in (1, queries * group) and bias.shape[3] == length
        if not biased or len(pad) != batch or unpad.numel() != rows or len(values) != len(keys):
            return None
        y = empty((rows, self.heads * self.v_width), dtype=self.held)
        most = group * max(1, CHUNK_ROWS // group)
        threads = count_threads(rows * self.heads * length * self.width, FEWEST_SHARED)
        return Call(
            kernel="attend_chunks",
            arguments=(
                *(tensor.data_ptr() for tensor in (*tensors, y)),
                rows,
                len(keys),
                batch,
                queries,
                self.heads,
                self.kv_heads,
                columns,
                self.size,
                self.width,
                self.v_width,
                values.shape[3],
                0 if len(bias) == 1 else bias.stride(0),
                0 if bias.shape[2] == 1 else self.bias_rows * length,
            ),
            outputs=y,
            scratch=4 * threads * (most * (self.width + self.size + self.v_width + 2) + self.width * self.size),
            threads=threads,
            refusal=f"the block table names blocks that are none of the {len(keys)} of the cache, or rows are not "
            "packed again as they were laid out",
        )
