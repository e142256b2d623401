"""Fills plugins/passed.json from a recorded run: which kernels gave the references' results, on which SM and device.

    python -m benchmarks.gpu --save run.json     # on the GPU
    python -m benchmarks.passed run.json         # where the repository is; commit what it changes

A kernel's source has passed where all its rows of the run were measured and right, at every size of every model and in
every variant that a config can ask for. Others are named with the reason. Exit status 1 if nothing has passed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.kernel_rows import Row, list_rows
from plugins.passed import TABLE


def save_run(path: Path, rows: Sequence[Row], *, sm: int, device: str) -> None:
    """sm: that the kernels were compiled for."""
    today = datetime.now(UTC).date().isoformat()
    run = {"device": device, "sm": sm, "date": today, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")


def judge(run: dict[str, Any]) -> dict[str, str]:
    """Each source of today's kernels -> why it has not passed; nothing where it has."""
    measured = {_key(row): Row(**row) for row in run["rows"]}
    verdicts: dict[str, str] = {}
    for row, _ in list_rows(run["sm"]):
        found = measured.get(_key(asdict(row)))
        if found is None or found.error is None:
            why = f"{row.name} was not measured" + (f": {found.failure}" if found and found.failure else "")
        elif found.sources != row.sources:
            why = f"{row.operation} was edited since"
        else:
            why = "" if found.is_right else f"{row.name} is {found.error:.3g} of the bound from its reference"
        for source in row.sources:
            verdicts[source] = verdicts.get(source) or why
    return verdicts


def record(run: dict[str, Any], table: Path = TABLE) -> list[str]:
    """Adds a row for each source that has passed, in place of an earlier one of this source, SM and device -> them."""
    passed = sorted(source for source, why in judge(run).items() if not why)
    place = {"sm": run["sm"], "device": run["device"]}
    runs = json.loads(table.read_text(encoding="utf-8"))["runs"]
    kept = [row for row in runs if (row["sm"], row["device"]) != tuple(place.values()) or row["source"] not in passed]
    kept += [{"source": source, **place, "date": run["date"]} for source in passed]
    table.write_text(json.dumps({"runs": kept}, indent=2) + "\n", encoding="utf-8")
    return passed


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["operation"], row["model"], row["step"]


def main(arguments: Sequence[str] | None = None, table: Path = TABLE) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="what `python -m benchmarks.gpu --save` wrote")
    run = json.loads(parser.parse_args(arguments).run.read_text(encoding="utf-8"))
    run["rows"] = [{**row, "sources": tuple(row["sources"])} for row in run["rows"]]
    passed = record(run, table)
    names: dict[str, set[str]] = {}
    for row, _ in list_rows(run["sm"]):
        for source in row.sources:
            names.setdefault(source, set()).add(row.operation)
    for source, why in judge(run).items():
        print(f"{', '.join(sorted(names[source]))}, SM{run['sm']}: {why or 'passed on ' + run['device']}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
