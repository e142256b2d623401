"""Kernels that have passed on a GPU: a run as it would have been saved, and a table in place of plugins/passed.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kernel_rows import Row, list_rows
from benchmarks.passed import save_run
from plugins import passed

LOWERINGS = ("rope_paged_kv", "paged_attention", "moe_experts", "moe_all_to_all")


def fill_table(path: Path, patch: pytest.MonkeyPatch, sm: int = 80, lowerings: tuple[str, ...] = LOWERINGS) -> Path:
    """The kernels of these lowerings have passed on an A100, of this SM → the table."""
    sources = [passed.digest_plugin(name) for name in lowerings]
    rows = [{"source": source, "sm": sm, "device": "A100", "date": "2026-12-01"} for source in sources]
    path.write_text(json.dumps({"runs": rows}))
    patch.setattr(passed, "TABLE", path)
    return path


def save_fake_run(
    path: Path, change: Callable[[Row], Row | None] = lambda row: row, sm: int = 90, device: str = "NVIDIA H200"
) -> Path:
    """Every kernel right but for what `change` says → the saved run."""
    rows = [
        replace(row, error=0.5, seconds=1e-5, of_floor=0.9, of_bandwidth=0.9, unfused=3.0) for row, _ in list_rows(sm)
    ]
    changed = [row for row in map(change, rows) if row is not None]
    save_run(path, changed, sm=sm, device=device)
    return path
