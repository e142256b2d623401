"""What config.json says under our own key: that the folder is an engine checkpoint, and how it is quantized.

Checked whenever a folder is opened, since another version of trtseek, or an editor, may have written it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.config_values import spell
from pipeline.checkpoint.tensors import MODEL_DTYPES
from pipeline.errors import CheckpointError

OWN_KEY = "trtseek"
FORMAT = 1  # of the engine checkpoint; readers refuse others
# What the source said of its type, in our key: only where that was nothing, or not what the weights are.
STATED_KEY = "stated_dtype"
CACHES = {"FP8": "fp8", "INT8": "int8"}  # TensorRT-LLM's name of a quantized KV cache's type -> a network's
HINT = "open it with the version of trtseek that wrote it, or run its stage again with this one; or undo the edit"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKey:
    """`dtype`: of the weights that are not quantized, in torch's spelling. `quantization`: None where nothing is.
    `stated`: the source's own keys for its type, None where they say what the weights are."""

    dtype: str
    quantization: Mapping[str, Any] | None
    stated: Mapping[str, Any] | None

    @property
    def kv_cache(self) -> str:
        """What the KV cache holds, as a NetworkSpec has it."""
        return CACHES.get((self.quantization or {}).get("kv_cache_quant_algo") or "", "model")


def parse_own_key(config: Mapping[str, Any], origin: str) -> OwnKey | None:
    """None for a parsed config.json that is no engine checkpoint's. Raises CheckpointError, naming the file (`origin`),
    the key and its value, for what this version does not write."""
    if OWN_KEY not in config:
        return None
    own = _read_object(config[OWN_KEY], origin, OWN_KEY)
    _require(own, "format", (FORMAT,), origin)
    _require(own, "dtype", tuple(MODEL_DTYPES), origin)
    quantization, stated = own.get("quantization"), own.get(STATED_KEY)
    if quantization is not None:
        _read_object(quantization, origin, f"{OWN_KEY}.quantization")
        _require(quantization, "kv_cache_quant_algo", (None, *CACHES), origin)
        linears = _read_object(quantization.get("quantized", {}), origin, f"{OWN_KEY}.quantization.quantized")
        for name, linear in linears.items():
            _read_object(linear, origin, f"{OWN_KEY}.quantization.quantized: {name}")
    if stated is not None:
        _read_object(stated, origin, f"{OWN_KEY}.{STATED_KEY}")
    return OwnKey(dtype=own["dtype"], quantization=quantization, stated=stated)


def _read_object(value: Any, origin: str, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin}: {key} is {spell(value)}, not an object", hint=HINT)
    return value


def _require(values: Mapping[str, Any], key: str, known: tuple[Any, ...], origin: str) -> None:
    value = values.get(key)
    if isinstance(value, list | dict) or value not in known:
        spelled = ", ".join("null" if each is None else str(each) for each in known)
        raise CheckpointError(f"{origin}: {OWN_KEY}: {key} is {spell(value)}; this version reads {spelled}", hint=HINT)
