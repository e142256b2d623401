"""The tensors of a foreign linear by the name of the linear and what follows it, checked as they are looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder

FLOAT_TYPES = ("F16", "BF16", "F32")


class Headers:
    """Of `folder`. Methods raise CheckpointError, naming file and tensor, for what is missing or is something else."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder

    def fail(self, base: str, kind: str, problem: str) -> CheckpointError:
        name = f"{base}.{kind}"
        place = self.folder.file_of(name) if name in self.folder.tensors else self.folder.path
        return CheckpointError(
            f"{place}: {name} {problem}",
            hint="config.json and the weights are of two models, or one of them is damaged: copy them again",
        )

    def has(self, base: str, kind: str) -> bool:
        return f"{base}.{kind}" in self.folder.tensors

    def names(self, base: str, *kinds: str) -> tuple[str, ...]:
        return tuple(f"{base}.{kind}" for kind in kinds)

    def matrix(self, base: str, kind: str, types: Sequence[str]) -> tuple[int, int]:
        """The shape of a tensor that has two dimensions and one of `types`."""
        self._type(base, kind, types)
        shape = self.folder.tensors[f"{base}.{kind}"].shape
        if len(shape) != 2 or 0 in shape:
            raise self.fail(base, kind, f"has shape {list(shape)}; a matrix is expected")
        return shape[0], shape[1]

    def check(self, base: str, kind: str, types: Sequence[str], *shapes: tuple[int, ...]) -> str:
        """The type of a tensor that has one of `types` and of `shapes`."""
        found = self._type(base, kind, types)
        shape = self.folder.tensors[f"{base}.{kind}"].shape
        if shape not in shapes:
            wanted = " or ".join(str(list(each)) for each in shapes)
            raise self.fail(base, kind, f"has shape {list(shape)}, the weight beside it asks for {wanted}")
        return found

    def read(self, base: str, kind: str) -> torch.Tensor:
        """Over the file's own memory: not to be written to."""
        return self.folder.read(f"{base}.{kind}").to_torch()

    def read_groups(self, base: str, kind: str, count: int) -> torch.Tensor:
        """The group of each input, int64, of `count` groups."""
        found = self.read(base, kind).long()
        if int(found.min()) < 0 or int(found.max()) >= count:
            raise self.fail(base, kind, f"names groups beyond the {count} that there are")
        return found

    def _type(self, base: str, kind: str, types: Sequence[str]) -> str:
        info = self.folder.tensors.get(f"{base}.{kind}")
        if info is None:
            raise self.fail(base, kind, "is missing")
        if info.dtype not in types:
            raise self.fail(base, kind, f"is {info.dtype}; read is {' or '.join(types)}")
        return info.dtype
