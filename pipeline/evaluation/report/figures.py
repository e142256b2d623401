"""Which plots a report has, from what was measured. Whatever is missing is left out."""

from __future__ import annotations

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
        _by_layer(others, labels, "kl", "KL by layer", "KL, nats", _describe_lens(others[0]["layers"])),
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


def _describe_lens(layers: Sequence[Document]) -> str:
    count = layers[0].get("lens_positions") if layers else None  # reports of earlier versions have none
    return f"of what final norm and head read in each layer, at a sample of {f'{count} ' if count else ''}positions"


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


def plot_linears(cells: Sequence[Document]) -> Plot | None:
    """The activation-error heat map of quantization.json: layer by scale group, an error in each cell."""
    places: dict[tuple[str, int], list[Document]] = {}
    for cell in cells:
        places.setdefault((cell["group"], cell["layer"]), []).append(cell)
    means = {place: mean_loss(of_place, "loss_after") for place, of_place in places.items()}
    rows = {place: mean for place, mean in means.items() if mean is not None}  # of the head nothing is measured
    note = "squared error of the linears' outputs over the squared outputs, on the calibration text"
    return _plot_cells(rows, "Activation error, layer by scale", "squared error, share", note)


def plot_coverage(layers: Mapping[str, Mapping[str, Document]]) -> Plot | None:
    """How much of what the calibration text says changed between half of its samples and all."""
    rows = {(name, int(layer)): row["change"] for layer, inputs in layers.items() for name, row in inputs.items()}
    note = "how far the channels' sizes moved between half of the calibration text and all of it"
    return _plot_cells(rows, "Calibration coverage", "change", note)


def plot_saturation(shares: Sequence[Document]) -> Plot | None:
    """How the scales settled as calibration text was added, up to all of it."""
    if len(shares) < 2:
        return None
    svg = plot_lines(
        [100 * row["share"] for row in shares] + [100],
        [[*(row[key] for row in shares), 0.0] for key in ("mean", "largest")],
        x_label="share of the calibration samples, %",
        y_label="change of scale",
    )
    note = "how far the scales of a share of the samples are from those of all"
    return Plot(title="Calibration saturation", svg=svg, note=note, legend=["mean of all inputs", "largest"])


def mean_loss(cells: Sequence[Document], key: str) -> float | None:
    """Of all linears of some rows of quantization.json's heat map; None where nothing was measured."""
    losses = [(cell[key], cell["linears"]) for cell in cells if cell[key] is not None]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses) if losses else None


def _plot_cells(cells: Mapping[tuple[str, int], float], title: str, bar: str, note: str) -> Plot | None:
    """A heat map of values by name and layer."""
    if not cells:
        return None
    names = list(dict.fromkeys(name for name, _ in cells))
    layers = range(min(layer for _, layer in cells), max(layer for _, layer in cells) + 1)
    values = [[cells.get((name, layer)) for layer in layers] for name in names]
    svg = plot_heat_map(values, rows=names, columns=[str(i) for i in layers], x_label="decoder layer", bar=bar)
    return Plot(title=title, svg=svg, note=note)


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
