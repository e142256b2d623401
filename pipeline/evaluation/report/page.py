"""The report's page: what was measured, put into words and shapes. The template escapes everything from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipeline
from pipeline.evaluation.gates import spell_bound, spell_value
from pipeline.evaluation.report.figures import (
    Plot,
    plot_checkpoints,
    plot_coverage,
    plot_experts,
    plot_linears,
    plot_saturation,
)
from pipeline.evaluation.report.tables import tabulate_groups, tabulate_network, tabulate_tasks
from pipeline.evaluation.report.words import spell_bytes, spell_number, spell_seconds, spell_share
from pipeline.text_file import write_text

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
TEMPLATE = "report.html.j2"
SHARE, TASKS = "loss / baseline's", "tasks"
VERDICTS = {True: ("pass", "pass"), False: ("fail", "FAIL"), None: ("skip", "off")}
COLUMNS = ("weights", "perplexity", "ratio", "mean KL", "max KL", "top-1", "top-5", SHARE, TASKS)
SECTIONS = ("tiles", "gates", "stages", "sizes", "columns", "checkpoints", "plots", "tables", "samples")
Document = Mapping[str, Any]


def write_comparison(document: Document, path: Path) -> None:
    """The page of a `compare`. OSError where it cannot be written; the file appears whole or not at all."""
    rows = document["checkpoints"]
    context = {
        "title": f"{len(rows)} checkpoints compared",
        "subtitle": " · ".join(row["label"] for row in rows),
        **_describe_quality(document),
        "tables": tabulate_tasks(rows),
    }
    write_page(context, path)


def write_run(document: Document, path: Path) -> None:
    """The page of a run; `document` is what pipeline/stages/run_report.py gathers."""
    write_page(describe_run(document), path)


def describe_run(document: Document) -> dict[str, Any]:
    """The template's values for a run."""
    verification, quantization = document.get("verify") or {}, document.get("quantization") or {}
    quality = verification.get("quality") or {"checkpoints": [], "samples": []}
    gates = verification.get("gates", [])
    described = _describe_quality(quality) if quality["checkpoints"] else {"plots": []}
    plots: list[Plot | None] = [*described.pop("plots")]
    if quantization:
        plots += [
            plot_linears(quantization.get("heat_map", [])),
            plot_experts(quantization.get("experts", {})),
            plot_coverage(quantization.get("coverage", {}).get("layers", {})),
            plot_saturation(quantization.get("coverage", {}).get("saturation", [])),
        ]
    return {
        "key": document["key"],
        "title": document["name"],
        "subtitle": document["subtitle"],
        "verdict": _judge(gates, document),
        "tiles": _tiles(document, quantization, quality["checkpoints"]),
        "gates": [_describe_gate(gate) for gate in gates],
        "stages": _bars([(s["name"], s["seconds"], _describe_stage(s)) for s in document["stages"]]),
        "sizes": _bars([(s["name"], s["bytes"], spell_bytes(s["bytes"])) for s in document["sizes"]]),
        **described,
        "plots": [plot for plot in plots if plot],
        "tables": [
            *tabulate_groups(quantization.get("heat_map", [])),
            *tabulate_tasks(quality["checkpoints"]),
            *tabulate_network(verification),
        ],
    }


def write_page(context: Mapping[str, Any], path: Path) -> None:
    text = (
        _environment()
        .get_template(TEMPLATE)
        .render(
            {
                **dict.fromkeys(SECTIONS, ()),
                "key": "",
                "subtitle": "",
                "verdict": None,
                "style": (HERE / "style.css").read_text(encoding="utf-8"),
                "footer": f"trtseek {pipeline.__version__}. All of this was computed on a CPU.",
                **context,
            }
        )
    )
    write_text(path, text)


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Our own style sheet and matplotlib's markup, the only values that are not text.
    environment.filters["markup"] = Markup
    return environment


def _describe_quality(document: Document) -> dict[str, Any]:
    rows, baseline = document["checkpoints"], document.get("baseline")
    shown = {**dict.fromkeys(COLUMNS, True), SHARE: baseline is not None, TASKS: bool(rows[0]["accuracy"])}
    columns = [name for name in COLUMNS if shown[name]]
    lines = [*rows, {**baseline, "bytes": None, "accuracy": None}] if baseline else rows
    return {
        "tokens": rows[0]["tokens"],
        "columns": columns,
        "checkpoints": [{"label": row["label"], "cells": _describe_row(row, columns)} for row in lines],
        "plots": plot_checkpoints(rows),
        "samples": [_describe_sample(sample) for sample in document["samples"]],
    }


def _describe_row(row: Document, columns: Sequence[str]) -> list[str]:
    share = row.get("baseline_share")
    cells = (
        spell_bytes(row["bytes"]) if row["bytes"] is not None else "",
        spell_number(row["perplexity"], ".3f"),
        spell_number(row["perplexity_ratio"], ".4f"),
        spell_number(row["mean_kl"], ".3g"),
        spell_number(row["max_kl"], ".3g"),
        spell_share(row["top1_agreement"]),
        spell_share(row["top5_overlap"]),
        spell_number(share, ".2f") if share is not None else "-",
        spell_share(row["accuracy"]["accuracy"]) if row["accuracy"] else "",
    )
    return [cell for name, cell in zip(COLUMNS, cells, strict=True) if name in columns]


def _describe_sample(sample: Document) -> dict[str, Any]:
    versions = [{**version, "rest": version["text"][len(version["agreed"]) :]} for version in sample["continuations"]]
    kl, whose = spell_number(sample["kl"], ".3g"), sample.get("checkpoint")  # an earlier version's has no name
    title = f"KL {kl} nats, of {whose}" if whose else f"KL {kl} nats"
    return {"title": title, "prompt": sample["prompt"], "continuations": versions}


def _describe_gate(gate: Document) -> dict[str, str]:
    kind, verdict = VERDICTS[gate["passed"]]
    bound = "none" if gate["bound"] is None else f"{gate['relation']} {spell_bound(gate['bound'])}"
    value = "not measured" if gate["value"] is None else spell_value(float(gate["value"]), gate["bound"])
    blame = gate["blame"] if gate["passed"] is False else ""
    return {
        "name": gate["name"],
        "kind": kind,
        "verdict": verdict,
        "value": value,
        "bound": bound.replace("<=", "≤").replace(">=", "≥"),
        "meaning": gate["meaning"],
        "blame": blame,
    }


def _judge(gates: Sequence[Document], document: Document) -> dict[str, str]:
    failed = [gate["name"] for gate in gates if gate["passed"] is False]
    off = sum(gate["passed"] is None for gate in gates)
    judged = len(gates) - off
    if failed:
        return {"kind": "fail", "text": f"{len(failed)} of {judged} gates failed: {', '.join(failed)}; {off} off"}
    if not gates:
        return {"kind": "skip", "text": "not verified"}
    complete = "" if document["complete"] else "; the run is not complete"
    return {"kind": "pass", "text": f"{judged} gates passed, {off} off{complete}"}


# Shares of quantization.json -> what of; a report of an earlier version may lack one.
SIZES = {
    "linears_ratio": "of the quantized linears' 16-bit size",
    "ratio": "of the whole checkpoint's size",
}


def _tiles(document: Document, quantization: Document, rows: Sequence[Document]) -> list[dict[str, str]]:
    tiles = [
        {"value": spell_share(quantization[key]), "name": name} for key, name in SIZES.items() if key in quantization
    ]
    if len(rows) > 1:
        last = rows[-1]
        tiles += [
            {"value": spell_number(last["perplexity_ratio"], ".4f"), "name": "perplexity over the original's"},
            {"value": spell_number(last["mean_kl"], ".3g"), "name": "mean KL, nats"},
            {"value": spell_share(last["top1_agreement"]), "name": "same most likely token"},
        ]
    seconds = sum(stage["seconds"] for stage in document["stages"])
    return [*tiles, {"value": spell_seconds(seconds), "name": "for all stages"}]


def _describe_stage(stage: Document) -> str:
    size = f", {spell_bytes(stage['bytes'])} of files" if stage["bytes"] else ""
    return f"{spell_seconds(stage['seconds'])}{size}" + (f" ({stage['state']})" if stage["state"] else "")


def _bars(rows: Sequence[tuple[str, float, str]]) -> list[dict[str, Any]]:
    largest = max((value for _, value, _ in rows), default=0) or 1
    return [{"name": name, "percent": 100 * value / largest, "text": text} for name, value, text in rows]
