"""Compiles kernels for every SM, on all processors: `python -m plugins.resources` writes resources.md.

What to look for: spills other than 0; more than 99 KB of shared memory, which SM89 and SM120 do not have.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pipeline.digest import digest_bytes, digest_json
from plugins.compiler import SMS, Compiled, compile_kernel
from plugins.operation import Kernel
from plugins.subjects import list_subjects

TABLE = Path(__file__).with_name("resources.md")
HEAD = """# Kernels as compiled

`python -m plugins.resources` writes this table, with Triton {triton} and the assemblers that it carries; no GPU needed.
Of each kernel for each SM that it is meant for: registers of a thread / bytes that it spills / bytes of shared memory
of a program. A kernel that several subjects have stands with the first of them.

Made from {digest}.

| operation | model | kernel | threads | {sms} |
|---|---|---|---|{lines}|
"""
Place = tuple[str, str, str]  # operation, model, kernel


def list_kernels() -> dict[Kernel, tuple[Place, tuple[int, ...]]]:
    """Each kernel once: where it stands in the table, and the SMs that it is meant for."""
    found: dict[Kernel, tuple[Place, tuple[int, ...]]] = {}
    for subject in list_subjects():
        for kernel in subject.operation.kernels():
            found.setdefault(kernel, ((subject.operation.NAME, subject.model, _name(kernel)), subject.sms))
    return found


def _name(kernel: Kernel) -> str:
    constants = dict(kernel.constants)
    variant = "".join(f", {name.lower()}" for name in ("SPLIT", "GATED") if constants.get(name))
    return f"{kernel.function} of {constants['ROWS']} rows{variant}" if "ROWS" in constants else kernel.function


def digest_sources() -> str:
    """Of all that decides what the compiler makes: kernels' sources, their constants and options, and Triton."""
    kernels = list_kernels()
    folder = Path(__file__).parent
    sources = [folder / "compiler.py", *sorted({folder / kernel.plugin / "kernel.py" for kernel in kernels})]
    return digest_json(
        {
            "triton": importlib.metadata.version("triton"),
            "sources": [digest_bytes(source.read_bytes()) for source in sources],
            "kernels": [[repr(kernel), sms] for kernel, (_, sms) in kernels.items()],
        }
    )


def describe(made: Compiled) -> str:
    return f"{made.registers} / {made.spills} / {made.shared}"


def write_rows() -> Iterator[str]:
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        compiling = [
            (place, {sm: pool.submit(compile_kernel, kernel, sm) for sm in sms})
            for kernel, (place, sms) in list_kernels().items()
        ]
        for place, running in compiling:
            made = {sm: compiled.result() for sm, compiled in running.items()}
            threads = next(iter(made.values())).threads
            cells = [describe(made[sm]) if sm in made else "" for sm in SMS]
            yield f"| {' | '.join([*place, str(threads), *cells])} |\n"


def read_rows(text: str) -> dict[Place, dict[int, str]]:
    """The table again: of each kernel, what is said of it for each SM."""
    rows: dict[Place, dict[int, str]] = {}
    for line in text.partition("|---|")[2].splitlines()[1:]:
        operation, model, kernel, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[operation, model, kernel] = {sm: cell for sm, cell in zip(SMS, cells, strict=True) if cell}
    return rows


def main() -> None:
    head = HEAD.format(
        triton=importlib.metadata.version("triton"),
        digest=digest_sources(),
        sms=" | ".join(f"SM{sm}" for sm in SMS),
        lines="|".join(["---"] * len(SMS)),
    )
    TABLE.write_text(head + "".join(write_rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
