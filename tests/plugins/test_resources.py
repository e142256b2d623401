"""The table of compiled kernels: of today's kernels, all of them, as they compile today."""

from __future__ import annotations

import random

import pytest

from plugins import resources
from plugins.compiler import compile_kernel
from plugins.operation import Kernel
from plugins.registry import OPERATIONS
from plugins.resources import TABLE, describe, digest_sources, list_kernels, read_rows

ROWS = read_rows(TABLE.read_text(encoding="utf-8"))
MOST_SHARED = 99 << 10  # of SM89 and SM120
# Where the assembler would rather spill a few registers than have one program less on a multiprocessor. The loop over
# keys or inputs touches none of these: they are written before it and read after it (cuobjdump -sass). The experts'
# products would do without at two load stages instead of three, with a load less under way at every turn.
SPILLED = {
    ("paged_attention", "Llama-8B", "attend of 64 rows"): 8,
    ("paged_attention", "Llama-8B, bfloat16", "attend of 64 rows"): 8,
    ("paged_latent_attention", "V2-Lite, bfloat16, int8 cache", "attend of 16 rows, split"): 4,
    ("moe_experts", "V2-Lite, bfloat16, fp8, prescale shared", "multiply of 64 rows, gated"): 8,
    ("moe_experts", "V2-Lite, bfloat16, fp8, prescale each", "multiply of 64 rows, gated"): 8,
}
SPILLED_OF_FLOAT32 = 20  # the most of these
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
            assert spills <= SPILLED.get(place, SPILLED_OF_FLOAT32 if "float32" in place[1] else 0), place


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
def test_others_compile_to_what_the_table_says() -> None:
    """A sample of all operations and SMs."""
    draw = random.Random(0)
    every = [(kernel, sm) for kernel, (_, sms) in list_kernels().items() for sm in sms]
    for kernel, sm in draw.sample(every, 40):
        check(kernel, sm)
