"""The kernels that travel inside an engine: PTX of each, for each SM, as one plugin field.

One JSON object: {"kernels": [{function, sm, entry, threads, shared, ptx}, …]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.errors import CompatibilityError
from plugins.compiler import NAMES, compile_kernel
from plugins.driver import Function
from plugins.operation import Operation


@dataclass(frozen=True, slots=True)
class Carried:
    """Kernels by (index into the operation's `kernels()`, SM)."""

    functions: dict[tuple[int, int], Function]

    def to_json(self) -> str:
        return json.dumps(
            {
                "kernels": [
                    {
                        "kernel": index,
                        "sm": sm,
                        "entry": function.entry,
                        "threads": function.threads,
                        "shared": function.shared,
                        "ptx": function.ptx.decode(),
                    }
                    for (index, sm), function in sorted(self.functions.items())
                ]
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> Carried:
        functions = {}
        for row in json.loads(text)["kernels"]:
            functions[row["kernel"], row["sm"]] = Function(
                ptx=row["ptx"].encode(), entry=row["entry"], threads=row["threads"], shared=row["shared"]
            )
        return cls(functions)

    def find(self, name: str, index: int, sm: int) -> Function:
        """Plugin `name`'s kernel `index` for a GPU. Raises CompatibilityError where the engine carries none that it can
        run."""
        if (index, sm) in self.functions:
            return self.functions[index, sm]
        here = [found for number, found in self.functions if number == index]
        fitting = [found for found in here if found == sm or (found < sm and found not in NAMES)]
        if not fitting:
            carried = ", ".join(f"SM{found}" for found in sorted(here)) or "no GPU"
            raise CompatibilityError(
                f"the engine carries plugin {name} for {carried}, and this GPU is SM{sm}",
                hint="build the engine for this GPU",
            )
        return self.functions[index, max(fitting)]


def compile_carried(operation: Operation, sms: Iterable[int]) -> Carried:
    """Compiles every kernel of an operation. Raises BuildError where one does not compile."""
    functions = {}
    for sm in sms:
        for index, kernel in enumerate(operation.kernels()):
            made = compile_kernel(kernel, sm)
            functions[index, sm] = Function(ptx=made.ptx, entry=made.entry, threads=made.threads, shared=made.shared)
    return Carried(functions)
