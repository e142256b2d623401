"""The table of compiled kernels: of today's kernels, all of them, as they compile today."""

from __future__ import annotations

import random

import pytest

from plugins import resources
from plugins.compiler import compile_kernel
from plugins.operation import Kernel, Operation
from plugins.paged_attention.operation import PagedAttention, PagedLatentAttention
from plugins.registry import OPERATIONS
from plugins.resources import TABLE, describe, digest_sources, list_kernels, read_rows
from plugins.subjects import list_subjects

ROWS = read_rows(TABLE.read_text(encoding="utf-8"))
MOST_SHARED = 99 << 10  # of SM89 and SM120
# Where the assembler would rather spill two registers than have one program less on a multiprocessor.
SPILLED = {
    ("moe_experts", f"V2-Lite, bfloat16, fp8, prescale {prescale}", "multiply of 64 rows, gated"): 8
    for prescale in ("shared", "each")
}
# Kernels that compile in about a second, one of each module at least.
QUICK = ("write_heads", "pack", "combine")


def test_the_table_is_of_todays_kernels() -> None:
    """Of the compiler, the sources, every constant and option."""
    assert f"Made from {digest_sources()}.\n" in TABLE.read_text(encoding="utf-8"), "run python -m plugins.resources"


def test_every_kernel_is_in_the_table_and_nothing_else() -> None:
    wanted = dict(list_kernels().values())
    assert len(wanted) == len(list_kernels())  # no two have one name
    assert {place: tuple(cells) for place, cells in ROWS.items()} == wanted
    assert {operation for operation, _, _ in ROWS} == set(OPERATIONS)


def test_kernels_fit_every_card_and_keep_to_registers() -> None:
    for place, cells in ROWS.items():
        for cell in cells.values():
            registers, spills, shared = map(int, cell.split("/"))
            assert registers <= 255 and shared <= MOST_SHARED, place
            assert spills <= SPILLED.get(place, 0), place


def test_an_edited_kernel_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before, kernels = digest_sources(), list_kernels()
    assert digest_sources() == before
    _, *others = kernels.items()
    monkeypatch.setattr(resources, "list_kernels", lambda: dict(others))
    assert digest_sources() != before
    monkeypatch.setattr(resources, "list_kernels", lambda: kernels)
    monkeypatch.setattr(resources, "digest_bytes", lambda content: f"edited {len(content)}")
    assert digest_sources() != before


def check(kernel: Kernel, sm: int) -> None:
    place, _ = list_kernels()[kernel]
    assert describe(compile_kernel(kernel, sm)) == ROWS[place][sm], (place, sm)


def test_some_compile_to_what_the_table_says() -> None:
    seen = set[str]()
    for kernel, (_, sms) in list_kernels().items():
        if kernel.function in QUICK and kernel.module not in seen:
            seen.add(kernel.module)
            check(kernel, sms[0])
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.parametrize("heads", [PagedAttention, PagedLatentAttention])
def test_float32_fits_the_smallest_card(heads: type[Operation]) -> None:
    """What the table leaves out: attention of float32 models, which has the largest tiles."""
    (subject, *_) = [
        subject
        for subject in list_subjects()
        if isinstance(subject.operation, heads) and subject.operation.attributes()["dtype"] == "float32"
    ]
    for kernel in subject.operation.kernels():
        made = compile_kernel(kernel, 89)
        assert made.spills == 0 and made.shared <= MOST_SHARED


@pytest.mark.slow
def test_others_compile_to_what_the_table_says() -> None:
    """A sample of all operations and SMs."""
    draw = random.Random(0)
    every = [(kernel, sm) for kernel, (_, sms) in list_kernels().items() for sm in sms]
    for kernel, sm in draw.sample(every, 40):
        check(kernel, sm)
