"""Constants that a network names without holding them: for engines whose weights come later, and for digests.

A network is written as ever; each constant's bytes are made once, looked at, and dropped. So one definition serves the
build without weights, the refit that brings them, and the digest that says both are the network that was proved; and
memory holds one constant at a time, or one expert of it, whatever the model's size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.tensors import RawTensor
from pipeline.network.derived import Constant, Derived

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipeline.checkpoint.tensors import TensorInfo, TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """What is known of a constant without its bytes.

    dtype, shape: TensorRT's, "int4" among the types. digest: of the bytes that TensorRT is to be given. sources: the
    engine checkpoint's tensors that they are made from, in the order in which they are read. stored: whether they are
    those of the (first) source as they lie in its file; otherwise the network's writer makes them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    sources: tuple[str, ...]
    stored: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_MANY = 4096  # reads between clearings of those whose arrays are gone; DeepSeek-V3 has 180,000

# Sees each constant's bytes, which are gone when it returns, unless it keeps them.
Visitor = Callable[[Placeholder, RawTensor], None]


class Placeholders:
    """Takes a network's constants and holds none. With `visit`, each is made whole, for as long as the visit takes.
    `on_bytes` is told of every constant's bytes once it is done with."""

    def __init__(
        self, source: TensorSource, visit: Visitor | None = None, on_bytes: Callable[[int], object] = lambda _: None
    ) -> None:
        self.source = RecordingSource(source)
        self.found: dict[str, Placeholder] = {}
        self._visit, self._on_bytes = visit, on_bytes

    def take(self, name: str, constant: Constant, dtype: str, shape: tuple[int, ...]) -> None:
        """Digests the bytes of what TensorRT knows by name, type and shape, and shows them to the visitor."""
        from pipeline.digest import digest_bytes, digest_pieces

        self.source.forget()
        raw = constant
        if isinstance(constant, Derived) and self._visit is None:
            digest, nbytes = digest_pieces(self._release_each(constant)), constant.nbytes
        else:
            raw = constant.make() if isinstance(constant, Derived) else constant
            digest, nbytes = digest_bytes(raw.data), raw.data.nbytes
        stored = isinstance(constant, RawTensor)
        placeholder = Placeholder(
            name=name,
            dtype=dtype,
            shape=shape,
            nbytes=nbytes,
            digest=digest,
            sources=(self.source.name_of(constant),) if isinstance(constant, RawTensor) else self.source.read_names,
            stored=stored,
        )
        self.found[name] = placeholder
        if self._visit is not None and isinstance(raw, RawTensor):
            self._visit(placeholder, raw)
        self.source.release(placeholder.sources)
        self._on_bytes(nbytes)

    def _release_each(self, constant: Derived) -> Iterator[npt.NDArray[np.uint8]]:
        released = 0
        for piece in constant.pieces():
            yield piece
            names = self.source.read_names
            self.source.release(names[released:])
            released = len(names)


class RecordingSource:
    """A TensorSource that remembers which tensors were read, and of which one some bytes are."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._read: dict[str, None] = {}
        self._owners: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], str]] = {}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors

    @property
    def read_names(self) -> tuple[str, ...]:
        """What was read since `forget`, in order, once each."""
        return tuple(self._read)

    def read(self, name: str) -> RawTensor:
        raw = self._source.read(name)
        self._owners[id(raw.data)] = (weakref.ref(raw.data), name)
        self._read[name] = None
        return raw

    def forget(self) -> None:
        self._read.clear()
        if len(self._owners) > _MANY:
            self._owners = {key: owner for key, owner in self._owners.items() if owner[0]() is not None}

    def name_of(self, raw: RawTensor) -> str:
        """The tensor whose bytes these are. ValueError for copied ones: a mistake of the network's writer."""
        reference, name = self._owners.get(id(raw.data), (None, ""))
        if reference is None or reference() is not raw.data:
            raise ValueError(f"{raw.dtype}{list(raw.shape)} was not read from the checkpoint; describe it as Derived")
        return name

    def release(self, names: tuple[str, ...]) -> None:
        """Lets go of the tensors' resident pages, where the source maps files."""
        release = getattr(self._source, "release", None)
        if release is not None:
            for name in names:
                release(name)
