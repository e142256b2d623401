"""Tokens to their experts' ranks and back: counts first, then rows in their true numbers. No token is ever dropped.

A group of `ranks` shares a layer's `experts` evenly: the first experts / ranks are on its first rank, and so on. Each
rank brings its own T rows; T is the same on all (rows that only fill up have experts of -1, and go nowhere). Between
the two operations each rank runs its own experts on what it was sent. A token with several experts on one rank goes
there once, with all its experts and weights; that rank sums them up with their weights, and one row comes back.

Routing weights go along, and are not kept for the combine: kept, every expert's row would have to come back by itself,
k of a token where one comes from each of its ranks now (experts drawn evenly, 1.5 times the bytes for V3 over 8 ranks,
1.1 over 32), each rounded to dtype, where a rank's sum is rounded once. They are 4 bytes beside a row's thousands, and
no payload touches them: "fp8" rounds what goes to the experts only. The native lowering sends each pair by itself in
any case, and weights what comes back.

Sizes: k experts of a token, R = ranks * T rows, as many as can come to one rank. The workspace of dispatch is
T * min(k, ranks) messages that go, R that come; that of combine, rows as many as go. Limits: T * min(k, ranks) < 2**31;
the group is ranks [first, first + ranks) of the world; all are joined by torch.distributed before their first step, and
run the same layers in the same order, on one stream with whatever else they exchange.

On a GPU the host reads the 2 * ranks counts between the launches, and waits for the stream to do so, once in each
operation: an engine with these plugins cannot be captured in a CUDA graph.

payload "model" sends rows as they are. "fp8" sends E4M3 and a scale for each row, its greatest element / 448, on any
GPU; what the experts get is within max(|x| / 16, scale / 1024) of what was sent. Results always come back in dtype.
Inputs are dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pipeline.errors import CompatibilityError
from plugins.moe_all_to_all.message import Message
from plugins.operation import (
    BYTES,
    POINTERS,
    SCRATCH_ALIGNMENT,
    Argument,
    Exchange,
    Input,
    Kernel,
    Launch,
    Memory,
    Operation,
    Output,
    Result,
    Scratch,
    Shape,
    Size,
    bind,
    divide_up,
    power_of_two,
)

MODULE = "plugins.moe_all_to_all.kernel"
RANKED_ROWS = 512  # of a program's tile, when tokens are sorted by rank
COMBINED_COLUMNS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllToAll(Operation):
    """What both have in common. first: the group's first rank. hidden: elements of a row."""

    LOWERING: ClassVar[str] = "moe_all_to_all"
    EXCHANGES: ClassVar[bool] = True

    dtype: str
    first: int
    ranks: int
    experts: int
    top_k: int
    hidden: int

    def __post_init__(self) -> None:
        if self.experts % self.ranks:
            raise CompatibilityError(
                f"{self.NAME}: {self.ranks} ranks do not divide {self.experts} experts",
                hint="take an expert parallel size that divides the model's routed experts",
            )

    @property
    def most_ranks(self) -> int:
        """Ranks that a token goes to, at most."""
        return min(self.top_k, self.ranks)

    def exchange(self, name: str, source: Memory, target: Memory, **rows: Any) -> Exchange:
        return Exchange(name=name, first=self.first, ranks=self.ranks, source=source, target=target, **rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeDispatch(_AllToAll):
    """Sends each token to the ranks of its experts.

    in: x [T, hidden] dtype; ids [T, k] int32, experts of the whole group, -1 for none; weights [T, k] fp32
    out: rows [R, hidden] dtype, what came, by rank and then by token; row_ids [R, k] int32 and row_weights [R, k] fp32,
        of those rows, experts of other ranks among them; places [T, k] int32, which of the rows that went is the
        token's at that expert, -1 where it goes to that rank for an earlier one; counts [2, ranks] int32, rows that
        went to each rank, and that came from each. Beyond the rows that came row_ids are -1 and row_weights 0; rows
        are whatever was there
    """

    NAME: ClassVar[str] = "moe_dispatch"
    INPUTS: ClassVar[tuple[tuple[str, int], ...]] = (("x", 2), ("ids", 2), ("weights", 2))

    payload: str

    @property
    def message(self) -> Message:
        scaled = self.payload == "fp8"
        element = 1 if scaled else BYTES[self.dtype]
        return Message(hidden=self.hidden, element_bytes=element, scaled=scaled, top_k=self.top_k)

    def input_types(self) -> tuple[str, ...]:
        return (self.dtype, "int32", "float32")

    def outputs(self) -> tuple[Output, ...]:
        rows = Size(0, 0, self.ranks)
        return (
            Output(shape=(rows, self.hidden), dtype=self.dtype),
            Output(shape=(rows, self.top_k), dtype="int32"),
            Output(shape=(rows, self.top_k), dtype="float32"),
            Output(shape=(Size(0, 0), self.top_k), dtype="int32"),
            Output(shape=(2, self.ranks), dtype="int32"),
        )

    def kernels(self) -> tuple[Kernel, ...]:
        message, columns = self.message, power_of_two(self.top_k)
        local = self.experts // self.ranks
        travels = "*i8" if message.scaled else POINTERS[self.dtype]
        ranked = {"TOP_K": self.top_k, "EXPERTS": self.experts, "LOCAL": local, "COLUMNS": columns, "TILE": RANKED_ROWS}
        layout = message.constants() | {
            "TILE": power_of_two(self.hidden),
            "COLUMNS": columns,
            "RANKS": self.ranks,
            "RANK_TILE": power_of_two(self.ranks),
        }
        x, ids, weights = ("x", POINTERS[self.dtype]), ("ids", "*i32"), ("weights", "*fp32")
        places, counts, sent = ("places", "*i32"), ("counts", "*i32"), (("words", "*i32"), ("rows", travels))
        warps = min(max(power_of_two(self.hidden) // 1024, 1), 8)
        return (
            _kernel("rank_tokens", (ids, places, counts, ("tokens", "i32")), ranked, 8),
            _kernel(
                "pack", (x, ids, weights, ("within", "*i32"), counts, *sent, places), layout | {"LOCAL": local}, warps
            ),
            _kernel("unpack", (*sent, counts, x, ids, weights), layout, warps),
        )

    def _scratch(self, tokens: int) -> tuple[int, int, int]:
        """Ends of the places within a rank, of the messages that go, of those that come."""
        end, ends = 0, []
        for size in (
            4 * tokens * self.top_k,
            tokens * self.most_ranks * self.message.bytes,
            tokens * self.ranks * self.message.bytes,
        ):
            end += divide_up(size, SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
            ends.append(end)
        return ends[0], ends[1], ends[2]

    def scratch_bytes(self, shapes: Sequence[Shape]) -> int:
        return self._scratch(shapes[0][0])[2]

    def launches(self, shapes: Sequence[Shape]) -> tuple[Launch | Exchange, ...]:
        tokens, (rank, pack, unpack) = shapes[0][0], self.kernels()
        messages, came, _ = self._scratch(tokens)
        within, goes, comes, counts = Scratch(0), Scratch(messages), Scratch(came), Result(4)
        ranked: dict[str, Argument] = {"ids": Input(1), "places": within, "counts": counts, "tokens": tokens}
        packed: dict[str, Argument] = {"x": Input(0), "ids": Input(1), "weights": Input(2), "within": within}
        packed |= {"counts": counts, "words": goes, "rows": goes, "places": Result(3)}
        unpacked: dict[str, Argument] = {"words": comes, "rows": comes, "counts": counts}
        unpacked |= {"x": Result(0), "ids": Result(1), "weights": Result(2)}
        return (
            *bind(rank, (self.ranks, 1, 1), ranked),
            self.exchange("counts", counts, Result(4, 4 * self.ranks), row_bytes=4, most=self.ranks),
            *bind(pack, (tokens, 1, 1), packed),
            self.exchange(
                "dispatch", goes, comes, row_bytes=self.message.bytes, most=self.ranks * tokens, counts=counts
            ),
            *bind(unpack, (self.ranks * tokens, 1, 1), unpacked),
        )

    def without_rounding(self) -> MoeDispatch:
        return replace(self, payload="model")

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        from plugins.gloo import find_group
        from plugins.moe_all_to_all.reference import dispatch

        return dispatch(self, find_group(self.first, self.ranks), *inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeCombine(_AllToAll):
    """Brings the experts' sums back, and adds up those of each token.

    in: rows [R, hidden] dtype, for each row that dispatch gave out, the weighted sum of this rank's experts; places
        [T, k] and counts [2, ranks] int32, of dispatch
    out: [T, hidden] dtype, summed in fp32 in order of the token's experts, rounded once
    """

    NAME: ClassVar[str] = "moe_combine"
    INPUTS: ClassVar[tuple[tuple[str, int], ...]] = (("rows", 2), ("places", 2), ("counts", 2))

    @property
    def row_bytes(self) -> int:
        return self.hidden * BYTES[self.dtype]

    def input_types(self) -> tuple[str, ...]:
        return (self.dtype, "int32", "int32")

    def outputs(self) -> tuple[Output, ...]:
        return (Output(shape=(Size(1, 0), self.hidden), dtype=self.dtype),)

    def kernels(self) -> tuple[Kernel, ...]:
        pointer = POINTERS[self.dtype]
        tile = min(power_of_two(self.hidden), COMBINED_COLUMNS)
        sizes = {"HIDDEN": self.hidden, "TILE": tile, "TOP_K": self.top_k}
        return (_kernel("combine", (("returned", pointer), ("places", "*i32"), ("output", pointer)), sizes, 4),)

    def scratch_bytes(self, shapes: Sequence[Shape]) -> int:
        return int(shapes[1][0]) * self.most_ranks * self.row_bytes

    def launches(self, shapes: Sequence[Shape]) -> tuple[Launch | Exchange, ...]:
        tokens, (kernel,) = shapes[1][0], self.kernels()
        arguments: dict[str, Argument] = {"returned": Scratch(0), "places": Input(1), "output": Result(0)}
        back = self.exchange(
            "combine",
            Input(0),
            Scratch(0),
            row_bytes=self.row_bytes,
            most=tokens * self.most_ranks,
            counts=Input(2),
            reverse=True,
        )
        return back, *bind(kernel, (tokens, divide_up(self.hidden, dict(kernel.constants)["TILE"]), 1), arguments)

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        from plugins.gloo import find_group
        from plugins.moe_all_to_all.reference import combine

        return (combine(self, find_group(self.first, self.ranks), *inputs),)


def _kernel(function: str, parameters: tuple[tuple[str, str], ...], constants: dict[str, Any], warps: int) -> Kernel:
    return Kernel(
        module=MODULE, function=function, parameters=parameters, constants=tuple(constants.items()), warps=warps
    )
