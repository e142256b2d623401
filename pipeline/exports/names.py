"""Lists of linears as formats spell them: a pattern for all of a kind, names where a kind is divided."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def make_patterns(chosen: Collection[str], every: Iterable[str]) -> list[str]:
    """Regular expressions that match `chosen` of `every` in full and no other: 45,000 experts are three kinds.

    A kind that is chosen in some layers (not in those for multi-token prediction) is one pattern with their numbers.
    """
    wanted, patterns = set(chosen), []
    for kind, names in _sort_kinds(every).items():
        spelled = re.escape(kind).replace(r"\#", r"\d+")
        if wanted.issuperset(names):
            patterns.append(spelled if len(names) > 1 else re.escape(names[0]))
            continue
        layers = [layer for layer, part in _sort_layers(names).items() if layer and wanted.issuperset(part)]
        if layers:
            patterns.append(spelled.replace(r"\d+", f"(?:{'|'.join(layers)})", 1))
        patterns += [re.escape(name) for name in names if name in wanted and _layer_of(name) not in layers]
    return patterns


def make_suffixes(chosen: Collection[str], every: Iterable[str]) -> list[str]:
    """The same for readers that look for a part of a name: "self_attn.o_proj" for that of every layer,
    "model.layers.61." for all of that layer."""
    wanted, every = set(chosen), list(every)
    layers = _sort_layers(every)
    # A reader may take "." for any character: layer 1's beginning is also that of layer 10.
    whole = [
        layer
        for layer, names in layers.items()
        if layer and wanted.issuperset(names) and not any(o != layer and o.startswith(layer) for o in layers)
    ]
    suffixes = [f"model.layers.{layer}." for layer in whole]
    for kind, names in _sort_kinds(name for name in every if _layer_of(name) not in whole).items():
        if len(names) > 1 and kind.count("#") == 1 and wanted.issuperset(names):
            suffixes.append(kind.partition(".#.")[2])
        else:
            suffixes += [name for name in names if name in wanted]
    return suffixes


def _sort_kinds(every: Iterable[str]) -> dict[str, list[str]]:
    """Names that differ in numbers only, by what they have in common."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in every:
        kinds[_NUMBER.sub("#", name)].append(name)
    return kinds


def _sort_layers(every: Iterable[str]) -> dict[str, list[str]]:
    layers: dict[str, list[str]] = defaultdict(list)
    for name in every:
        layers[_layer_of(name)].append(name)
    return layers


def _layer_of(name: str) -> str:
    """Its number, or nothing."""
    found = _NUMBER.search(name)
    return found[0] if found else ""
