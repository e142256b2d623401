"""What TensorRT said when it refused a network, made readable: its own error lines, the layer, a way out.

TensorRT reports through a logger and returns None. The patterns are those of 1.7; each was provoked once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# (pattern in TensorRT's message, types of the layers to blame where it names none, what to do)
KNOWN_ERRORS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        r"not supported by a dedicated kernel",
        ("ATTENTION_INPUT",),
        "no fused attention kernel for this type or head size: mark the attention layer decomposable, or use float16",
    ),
    (
        r"Key and Value must have the same shape|must have the same head dimension",
        ("ATTENTION_INPUT",),
        "attention wants q, k and v of one head size: absorb the projections (MLA), or pad v",
    ),
    (r"uses packed \(NHD\) inputs", ("ATTENTION_INPUT",), "attention wants padded [B, heads, Q, D] inputs"),
    (
        r"HW-specific datatypes: fp8",
        ("QUANTIZE", "DEQUANTIZE"),
        "FP8 needs SM89 or later: choose another GPU, or stages.quantize.method: awq",
    ),
    (
        r"HW-specific datatypes: int4",
        ("DEQUANTIZE",),
        "INT4 needs SM80 or later: choose another GPU, or stages.quantize.method: none",
    ),
    (
        r"FP32 GEMM is not supported",
        ("MATRIX_MULTIPLY",),
        "SM75 multiplies no float32 matrices, as routers do: choose a GPU of SM80 or later",
    ),
    (r"output tensor must be a network output", ("KV_CACHE_UPDATE",), "mark the updated pool as a network output"),
    (
        r"must have a static sequence length dimension",
        ("KV_CACHE_UPDATE",),
        "the pool's block size must be a fixed number; only the number of blocks may vary",
    ),
    (r"zero_point` whose coefficients aren't all zeros", ("DEQUANTIZE",), "INT4 must be symmetric: no zero points"),
    (r"moe_lowering", ("MOE",), "IMoELayer builds on no target of TensorRT-RTX: use moe: dense or moe: gather"),
    (r"has no runners that implement it", (), "this target has no kernel for the layer: express it by other layers"),
    (
        r"[Oo]ut of memory|std::bad_alloc|allocat\w+ failed",
        (),
        "free memory on this host: a build needs about twice the weights, beside the weights themselves",
    ),
    (
        r"is not supported by the (?:target|platform)|Target GPU SM",
        (),
        "choose a target that this backend builds for",
    ),
)
# What a host without a GPU always logs; never the cause.
_NOISE = re.compile(r"cudaError 35|CUDA driver version is insufficient|Error reading CUDA GPU properties")
# "(… In validate at /_src/optimizer/api/layers/x.cpp:124)" says nothing to a user
_SOURCE = re.compile(r" In \w+ at /_src/\S+?:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A refused network: TensorRT's lines (noise and repetitions gone), the layers they are about, what to do."""

    lines: tuple[str, ...]
    layers: tuple[str, ...]
    hint: str

    @property
    def message(self) -> str:
        where = f" at {', '.join(self.layers[:3])}{', …' if len(self.layers) > 3 else ''}" if self.layers else ""
        return f"TensorRT refused the network{where}: {'; '.join(self.lines) or 'it gave no reason'}"


def diagnose(errors: Sequence[str], layers: Iterable[tuple[str, str]]) -> Diagnosis:
    """Explains TensorRT's error messages. `layers` are the network's (name, type) pairs, type as "MATRIX_MULTIPLY"."""
    lines = tuple(dict.fromkeys(_SOURCE.sub("", e).strip() for e in errors if not _NOISE.search(e)))
    text = "\n".join(lines)
    known = next((row for row in KNOWN_ERRORS if re.search(row[0], text)), None)
    # TensorRT makes two layers of one attention and adds to the name that the network gave it.
    layers = tuple((re.sub(r"_Attention(In|Out)put$", "", name), kind) for name, kind in layers)
    named = _find_named([name for name, _ in layers], text)
    if not named and known:
        named = tuple(name for name, kind in layers if kind in known[1])
    return Diagnosis(lines=_drop_prefixed(lines), layers=named, hint=known[2] if known else "")


def _find_named(names: Sequence[str], text: str) -> tuple[str, ...]:
    """Layer names in the text, in network order; of names that are each other's beginnings, the longest."""
    found = [name for name in names if re.search(re.escape(name) + r"(?![\w.])", text)]
    found = found or [name for name in names if re.search(re.escape(name) + r"(?!\w*\.)", text)]
    return tuple(dict.fromkeys(n for n in found if not any(n != other and n in other for other in found)))


def _drop_prefixed(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Of lines that differ only in which API call failed ("ITensor::getDimensions: …"), the last."""
    last = {re.sub(r"^\w+::\w+: ", "", line): line for line in lines}
    return tuple(last.values())
