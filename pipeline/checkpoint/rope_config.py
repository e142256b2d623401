"""Rotary embedding settings as the hub's configs spell them: `rope_scaling`, or transformers 5's `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.config_values import ConfigValues

ORIGINAL = "original_max_position_embeddings"
# kind -> (numbers it needs, numbers it may have). A key outside these would change nothing in the kind's formula, so
# that the config must mean something else than what would be computed.
ROPE_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), (ORIGINAL,)),
    "dynamic": (("factor",), (ORIGINAL,)),
    "yarn": (
        ("factor",),
        (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
}
NAMES = ("type", "rope_type", "rope_theta")
IGNORED = ("finetuned",)  # a remark in some YaRN configs
# Switches that only one value is written for: yarn's correction range is rounded to whole dimensions, the whole head
# rotates.
FIXED: dict[str, object] = {"truncate": True, "partial_rotary_factor": 1}
# Smallest sensible values; the formulas divide by, or take logarithms of, all of these.
MINIMUM = {
    "factor": 1.0,
    "low_freq_factor": 1e-6,
    "high_freq_factor": 1e-6,
    ORIGINAL: 1.0,
    "attention_factor": 1e-6,
    "beta_fast": 0.0,
    "beta_slow": 0.0,
    "mscale": 0.0,
    "mscale_all_dim": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding: `kind` is default, linear, dynamic, yarn or llama3; `scaling` holds the kind's own numbers."""

    kind: str
    theta: float
    scaling: Mapping[str, float]
    interleaved: bool  # DeepSeek-V2 rotates even/odd pairs, Llama the two halves

    def get(self, key: str, default: float) -> float:
        return self.scaling.get(key, default)


def parse_rope(config: ConfigValues, *, interleaved: bool) -> Rope:
    """Raises CheckpointError for unknown kinds and keys, missing and absurd numbers, and what contradicts itself."""
    where = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    raw = config.values.get(where) or {}
    if not isinstance(raw, Mapping):
        raise config.fail(where, f"must be a mapping, not {raw!r}")
    inner = ConfigValues(raw, config.origin, prefix=f"{where}.")
    kind = _parse_kind(config, where, raw)
    needed, allowed = ROPE_KINDS[kind]
    missing = [key for key in needed if not inner.has(key)]
    if missing:
        raise config.fail(where, f"of type {kind} needs {', '.join(missing)}")
    for key, value in raw.items():
        if key not in (*NAMES, *IGNORED, *FIXED, *needed, *allowed):
            raise inner.fail(str(key), f"has no meaning for type {kind}, which reads {', '.join((*needed, *allowed))}")
        if key in FIXED and value is not None and value != FIXED[key]:
            raise inner.fail(key, f"is {value!r}; only {FIXED[key]!r} is supported")
    if config.values.get("partial_rotary_factor") not in (None, 1):
        raise config.fail("partial_rotary_factor", "is not 1; heads that rotate in part are not supported")
    scaling = {k: inner.number(k, minimum=MINIMUM[k]) for k in raw if k in (*needed, *allowed) and inner.has(k)}
    # transformers gives a key of this name at the top level priority; without any, max_position_embeddings stands in.
    if config.has(ORIGINAL) and (ORIGINAL in needed or kind == "yarn"):
        scaling[ORIGINAL] = config.number(ORIGINAL, minimum=1)
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise inner.fail("high_freq_factor", f"must exceed low_freq_factor {scaling['low_freq_factor']:g}")
    if (scaling.get("beta_fast") or 32) < (scaling.get("beta_slow") or 1):
        raise inner.fail("beta_fast", f"must not be below beta_slow {scaling.get('beta_slow', 1):g}")
    return Rope(kind=kind, theta=_parse_theta(config, inner, where), scaling=scaling, interleaved=interleaved)


def _parse_kind(config: ConfigValues, where: str, raw: Mapping[str, Any]) -> str:
    named = [raw[key] for key in ("rope_type", "type") if raw.get(key) is not None]
    if any(name != named[0] for name in named):
        raise config.fail(where, f"has rope_type {named[0]!r} and type {named[1]!r}, which contradict")
    kind = named[0] if named else "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise config.fail(where, f"has type {kind!r}; known types: {', '.join(ROPE_KINDS)}")
    return kind


def _parse_theta(config: ConfigValues, inner: ConfigValues, where: str) -> float:
    outer = config.number("rope_theta", 10000.0, minimum=1.0001)
    theta = inner.number("rope_theta", outer, minimum=1.0001)
    if config.has("rope_theta") and theta != outer:
        raise config.fail("rope_theta", f"is {outer:g}, but {where}.rope_theta is {theta:g}")
    return theta
