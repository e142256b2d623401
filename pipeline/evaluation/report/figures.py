"""Which plots a report has, from what was measured. Whatever is missing is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.evaluation.report.plots import plot_heat_map, plot_lines

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot with what is said under it. `legend`: labels of its lines, in the order of the page's colours."""

    title: str
    svg: str
    note: str = ""
    legend: Sequence[str] = ()


def plot_checkpoints(rows: Sequence[Document]) -> list[Plot]:
    """Of every checkpoint but the first against it: by layer, by position; of all, by context length."""
    others = rows[1:]
    if not others:
        return []
    labels = [row["label"] for row in others]
    plots = [
        _by_layer(others, labels, "error", "Error by layer", "relative RMS error", "of each decoder layer's output"),
        _by_layer(others, labels, "kl", "KL by layer", "KL, nats", "of what final norm and head read in each layer"),
        Plot(
            title="KL by position",
            svg=plot_lines(
                [bucket["last"] for bucket in others[0]["positions"]],
                [[bucket["kl"] for bucket in row["positions"]] for row in others],
                x_label="position in the text, up to",
                y_label="KL, nats",
                log_x=True,
            ),
            note="mean KL divergence from the original by the number of tokens before it",
            legend=labels,
        ),
    ]
    return plots + (_plot_context(rows) if rows[0]["context"] else [])


def _by_layer(rows: Sequence[Document], labels: Sequence[str], key: str, title: str, unit: str, note: str) -> Plot:
    svg = plot_lines(
        [layer["layer"] for layer in rows[0]["layers"]],
        [[layer[key] for layer in row["layers"]] for row in rows],
        x_label="decoder layer",
        y_label=unit,
    )
    return Plot(title=title, svg=svg, note=note, legend=labels)


def _plot_context(rows: Sequence[Document]) -> list[Plot]:
    lengths = [row["length"] for row in rows[0]["context"]]
    kl = plot_lines(
        lengths,
        [[each["kl"] for each in row["context"]] for row in rows[1:]],
        x_label="context length, tokens",
        y_label="KL, nats",
        log_x=True,
    )
    entropy = plot_lines(
        lengths,
        [[each["entropy"] for each in row["context"]] for row in [*rows[1:], rows[0]]],
        x_label="context length, tokens",
        y_label="entropy, nats",
        log_x=True,
        dashed=[len(rows) - 1],
    )
    labels = [row["label"] for row in rows[1:]]
    return [
        Plot(title="KL over the context", svg=kl, note="positions between two lengths", legend=labels),
        Plot(
            title="Entropy over the context",
            svg=entropy,
            note="of the next token's distribution; the original is dashed",
            legend=[*labels, rows[0]["label"]],
        ),
    ]


def plot_linears(linears: Mapping[str, Document]) -> Plot | None:
    """The activation-error heat map: each linear's output error on the calibration text, layer by kind of scale.

    Experts of one layer share a cell, their mean.
    """
    cells: dict[tuple[str, int], list[float]] = {}
    for name, record in linears.items():
        found = re.fullmatch(r"transformer\.layers\.(\d+)\.(.+)", name)
        loss = record.get("loss_after")
        if found and isinstance(loss, int | float):
            kind = re.sub(r"experts\.\d+\.", "experts.", found[2])
            cells.setdefault((kind, int(found[1])), []).append(float(loss))
    if not cells:
        return None
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    layers = range(min(layer for _, layer in cells), max(layer for _, layer in cells) + 1)
    values = [[_mean(cells.get((kind, layer))) for layer in layers] for kind in kinds]
    svg = plot_heat_map(
        values,
        rows=kinds,
        columns=[str(layer) for layer in layers],
        x_label="decoder layer",
        bar="squared error, share",
    )
    note = "squared error of each linear's output over the squared output, on the calibration text; experts: the mean"
    return Plot(title="Activation error, layer by scale", svg=svg, note=note)


def plot_experts(experts: Mapping[str, Document]) -> Plot | None:
    """Calibration tokens per routed expert, each layer's as multiples of an even share."""
    layers = {layer: record["tokens"] for layer, record in experts.items() if record.get("tokens")}
    if not layers:
        return None
    values = [[count * len(tokens) / max(1, sum(tokens)) for count in tokens] for tokens in layers.values()]
    svg = plot_heat_map(
        values,
        rows=list(layers),
        columns=[str(i) for i in range(max(map(len, values)))],
        x_label="expert",
        bar="times an even share",
    )
    return Plot(title="Tokens per expert", svg=svg, note="calibration tokens that each layer's router sent there")


def _mean(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None
