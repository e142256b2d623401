"""What building an engine takes of the host's memory: apart from the builder, since `plan` asks and imports little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.engine.limits import STRIPPED

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture

# Anonymous memory of the build process, measured with TensorRT-RTX 1.7: two copies of the weights in the builder, one
# more of INT4 weights in the network, which transposes them (2.6 in all for a 1.3B INT4 model), and its own half GB.
_COPIES, _OWN_BYTES = 2.7, 500_000_000
# Without weights: the compiler's own objects (2.0 GB for 27 layers of V2-Lite, 4.4 to 5.4 for the 60 of V2-236B).
_STRIPPED_BYTES, _STRIPPED_BYTES_PER_LAYER = 600_000_000, 85_000_000


def build_memory(architecture: Architecture, nbytes: int, weights: str) -> int:
    """Bytes of memory that a build from so many bytes of weights takes, beside the mapped files. weights: "full" or
    "stripped"."""
    if weights == STRIPPED:
        return _STRIPPED_BYTES + architecture.num_layers * _STRIPPED_BYTES_PER_LAYER
    return int(_COPIES * nbytes) + _OWN_BYTES
