"""What the benchmark of kernels measures, row by row: sizes, bars, and what a row says."""

from __future__ import annotations

from dataclasses import dataclass

from plugins.operation import Operation
from plugins.passed import digest_plugin
from plugins.subjects import list_subjects

# (tokens in the cache, new tokens) of each sequence.
STEPS: dict[str, list[tuple[int, int]]] = {
    "decode 1": [(1023, 1)],
    "decode 32": [(1023, 1)] * 32,
    "decode 256": [(1023, 1)] * 256,
    "prefill": [(0, 1024), (512, 512)],
    "mixed": [(0, 512), *[(8191, 1)] * 7],
}
# Of subjects that are held against the reference only, steps that start every kernel of theirs: single tokens of one
# sequence are split, those of many are not, those beside a prompt's chunk are launched apart from it; experts have few
# rows, or many.
CHECKED: dict[str, tuple[str, ...]] = {
    "paged_attention": ("decode 1", "decode 256", "prefill", "mixed"),
    "paged_latent_attention": ("decode 1", "decode 256", "prefill", "mixed"),
    "moe_experts": ("decode 32", "prefill"),
}
OK, SLOW, FAILED = "ok", "slow", "FAILED"
LARGE = ("decode 256", "prefill")
DECODE = ("decode 1", "decode 32", "decode 256")
BARS_OF = "H200"
# Operation, a part of the model's name, steps -> the least share of bandwidth, and the least of unfused. V3's latent
# attention has none: of 128 heads, it multiplies 240 times for each byte of the cache, more than an H200 does while it
# reads one.
BARS: tuple[tuple[str, str, tuple[str, ...], float, float], ...] = (
    ("rope_paged_kv", "", LARGE, 0.8, 0.0),
    ("rope_paged_kv", "", DECODE, 0.0, 2.0),
    ("rope_paged_latent", "", LARGE, 0.8, 0.0),
    ("rope_paged_latent", "", DECODE, 0.0, 2.0),
    ("paged_latent_attention", "V2-Lite", ("decode 32", "decode 256"), 0.6, 0.0),
    ("moe_experts", "int4", DECODE, 0.6, 0.0),
    ("moe_dispatch", "", LARGE, 0.7, 0.0),
    ("moe_combine", "", LARGE, 0.7, 0.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operation at the sizes of a model and a step. sources: digests of its kernels' plugins. error: the largest
    difference from the reference over the bound, at most 1 is right; None where it was not measured. failure: why not,
    where that was tried. timed: whether there is more to say than that; seconds: of a run; of_bandwidth, of_floor,
    unfused: see kernels.py."""

    operation: str
    model: str
    step: str
    sources: tuple[str, ...]
    timed: bool = True
    error: float | None = None
    failure: str = ""
    seconds: float = 0.0
    of_bandwidth: float = 0.0
    of_floor: float = 0.0
    unfused: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.operation}, {self.model}, {self.step}"

    def judge(self, device: str) -> str:
        """On a device of this name: right, right but below a bar on the card that has them, wrong, or nothing."""
        if not self.is_right:
            return FAILED if self.failure or self.error is not None else ""
        return SLOW if BARS_OF in device and self.list_missed() else OK

    @property
    def is_right(self) -> bool:
        return self.error is not None and self.error <= 1

    def describe(self) -> str:
        if self.error is None:
            return self.failure or "not measured"
        if not self.timed:
            return f"{self.error:.3f} of the bound"
        seen = f"{self.error:.3f} of the bound, {1e3 * self.seconds:.3f} ms, {self.of_bandwidth:.0%} of bandwidth, "
        seen += f"{self.of_floor:.0%} of floor, " if self.of_floor > self.of_bandwidth else ""
        return seen + f"{self.unfused:.1f} x unfused" + "".join(f"; below {bar}" for bar in self.list_missed())

    def list_missed(self) -> list[str]:
        """The bars that it does not reach: of an H200."""
        missed = []
        for operation, model, steps, bandwidth, unfused in BARS if self.timed else ():
            if operation == self.operation and model in self.model and self.step in steps:
                missed += [f"{bandwidth:.0%} of bandwidth"] if self.of_bandwidth < bandwidth else []
                missed += [f"{unfused:.0f} x"] if self.unfused < unfused else []
        return missed


def list_rows(sm: int) -> list[tuple[Row, Operation]]:
    """Every row that kernels for this SM have, not yet measured."""
    rows = []
    for subject in list_subjects():
        operation = subject.operation
        steps = STEPS if subject.timed else CHECKED.get(operation.NAME, ("prefill",))
        for step in steps if sm in subject.sms else ():
            sources = _name_sources(operation)
            row = Row(operation=operation.NAME, model=subject.model, step=step, sources=sources, timed=subject.timed)
            rows.append((row, operation))
    return rows


def _name_sources(operation: Operation) -> tuple[str, ...]:
    return tuple(sorted({digest_plugin(kernel.plugin) for kernel in operation.kernels()}))
