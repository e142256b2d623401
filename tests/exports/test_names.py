"""Patterns and parts of names that say which linears are meant, held against every name of a routed model."""

from __future__ import annotations

import re

from pipeline.exports.names import make_patterns, make_suffixes

LAYERS = [f"model.layers.{layer}." for layer in range(12)]
EVERY = [
    *(f"{layer}self_attn.{part}" for layer in LAYERS for part in ("q_proj", "o_proj")),
    *(f"{layer}mlp.experts.{e}.{part}" for layer in LAYERS for e in range(3) for part in ("gate_proj", "up_proj")),
    "lm_head",
]


def matched(patterns: list[str]) -> set[str]:
    return {name for name in EVERY if any(re.fullmatch(pattern, name) for pattern in patterns)}


def test_a_whole_kind_is_one_pattern() -> None:
    chosen = {name for name in EVERY if "experts" in name and name.endswith("up_proj")}
    patterns = make_patterns(chosen, EVERY)
    assert len(patterns) == 1
    assert matched(patterns) == chosen


def test_part_of_a_kind_is_named() -> None:
    chosen = {"model.layers.1.self_attn.o_proj", "lm_head", *(f"{layer}self_attn.q_proj" for layer in LAYERS)}
    patterns = make_patterns(chosen, EVERY)
    assert len(patterns) == 3
    assert matched(patterns) == chosen  # not layer 10 or 11


def test_some_layers_of_a_kind_are_one_pattern() -> None:
    chosen = {name for name in EVERY if "experts" in name and ".11." not in name} | {
        "model.layers.11.mlp.experts.0.up_proj"
    }
    patterns = make_patterns(chosen, EVERY)
    assert len(patterns) == 3
    assert matched(patterns) == chosen


def test_a_whole_layer_is_one_suffix_unless_others_begin_so() -> None:
    chosen = {name for name in EVERY if ".11." in name or ".1." in name}
    suffixes = make_suffixes(chosen, EVERY)
    assert "model.layers.11." in suffixes and "model.layers.1." not in suffixes
    assert {name for name in EVERY if any(re.match(each, name) for each in suffixes)} == chosen


def test_suffixes_are_found_in_the_chosen_names_alone() -> None:
    """As vLLM looks for them: anywhere in a name."""
    chosen = {"model.layers.1.self_attn.o_proj", "lm_head", *(f"{layer}self_attn.q_proj" for layer in LAYERS)}
    chosen |= {f"{layer}mlp.experts.2.up_proj" for layer in LAYERS}
    suffixes = make_suffixes(chosen, EVERY)
    assert {name for name in EVERY if any(suffix in name for suffix in suffixes)} == chosen
    assert "self_attn.q_proj" in suffixes
