"""`refit.json`: what an engine without weights must be given, a line for each constant, and which tensors make it.

The bytes are those that the network's own writer makes of the engine checkpoint (pipeline.network.network), so nothing
is derived a second way; the digests say whether they are the ones that were proved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engine.document import read_document
from pipeline.errors import BuildError
from pipeline.network.placeholders import Placeholder

FORMAT = 1
REFIT_LIST = "refit.json"
# "experts.{0..159}.fc": the names of 0 to 159, as a shell spells it.
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_INTEGER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitList:
    """The constants of one engine, in the order in which the network's writer makes them."""

    network_digest: str
    constants: tuple[Placeholder, ...]

    @property
    def nbytes(self) -> int:
        return sum(constant.nbytes for constant in self.constants)

    def to_json(self) -> str:
        rows = [{**each.to_json(), "sources": list(fold_names(each.sources))} for each in self.constants]
        values = {"format": FORMAT, "network_digest": self.network_digest}
        # One line for each constant: a person reads it, and a diff shows it.
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
        return f'{{\n{head},\n  "constants": [\n{lines}\n  ]\n}}\n'


def load_refit_list(path: Path) -> RefitList:
    """Reads a refit.json, or the one in a folder. Raises BuildError where it is missing or damaged."""
    path = path / REFIT_LIST if path.is_dir() else path
    hint = "build the engine again with stages.build.weights: stripped"
    values = read_document(path, kind="a refit list", version=FORMAT, hint=hint)
    try:
        constants = tuple(map(_read_constant, values["constants"]))
        return RefitList(network_digest=str(values["network_digest"]), constants=constants)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BuildError(f"{path}: does not list an engine's constants: {error}", hint=hint) from None


def _read_constant(row: Mapping[str, Any]) -> Placeholder:
    return Placeholder(**{**row, "shape": tuple(row["shape"]), "sources": tuple(unfold_names(row["sources"]))})


def fold_names(names: Sequence[str]) -> tuple[str, ...]:
    """One spelling for names that differ in one number counting up, `{first..last}`; other names as they are."""
    if len(names) < 2:
        return tuple(names)
    for match in _INTEGER.finditer(names[0]):
        before, after = names[0][: match.start()], names[0][match.end() :]
        first = int(match[0])
        if all(name == f"{before}{first + step}{after}" for step, name in enumerate(names)):
            return (f"{before}{{{first}..{first + len(names) - 1}}}{after}",)
    return tuple(names)


def unfold_names(names: Iterable[str]) -> Iterator[str]:
    """The inverse of `fold_names`."""
    for name in names:
        folded = _RANGE.search(name)
        if folded is None:
            yield name
            continue
        for number in range(int(folded[1]), int(folded[2]) + 1):
            yield f"{name[: folded.start()]}{number}{name[folded.end() :]}"
