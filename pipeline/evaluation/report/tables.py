"""The report's tables: a title, a note, columns and rows of text; none where nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.evaluation.report.figures import mean_loss
from pipeline.evaluation.report.words import spell_number, spell_share

Document = Mapping[str, Any]


def tabulate_tasks(rows: Sequence[Document]) -> list[dict[str, Any]]:
    """How many items of each task every checkpoint solved; `rows`: a comparison's checkpoints."""
    if not rows or not rows[0]["accuracy"]:
        return []
    names = list(rows[0]["accuracy"]["tasks"])
    lines = [
        [
            name,
            rows[0]["accuracy"]["tasks"][name]["items"],
            *(_describe_task(row["accuracy"]["tasks"][name]) for row in rows),
        ]
        for name in names
    ]
    note = "solved, and solved by mean log-likelihood per token"
    columns = ["task", "items", *(row["label"] for row in rows)]
    return [{"title": "Tasks", "note": note, "columns": columns, "rows": lines}]


def _describe_task(task: Document) -> str:
    return f"{spell_share(task['accuracy'])} / {spell_share(task['accuracy_normalised'])}"


def tabulate_network(verification: Document) -> list[dict[str, Any]]:
    """How far each layer of the network is from transformers', of verify.json."""
    network = verification.get("network")
    if not network:
        return []
    errors = zip(network["layer_errors"], network["declared_layer_errors"], strict=True)
    rows = [
        [i, spell_number(exact, ".2e"), spell_number(declared, ".2e")] for i, (exact, declared) in enumerate(errors)
    ]
    note = (
        f"{network['positions']} positions in {network['steps']} steps of the network that is compiled, executed "
        f"on the CPU; {network['left_out']} left out for a near-tied router"
    )
    columns = ["layer", "largest difference, fp32", "median error, declared types"]
    return [{"title": "The network against transformers", "note": note, "columns": columns, "rows": rows}]


def tabulate_groups(cells: Sequence[Document]) -> list[dict[str, Any]]:
    """What was done to each kind of linears, over all layers; `cells`: quantization.json's heat map."""
    kinds: dict[tuple[str, str, str, int | None], list[Document]] = {}
    for cell in cells:
        kinds.setdefault((cell["group"], cell["method"], cell["format"], cell.get("group_size")), []).append(cell)
    rows = [
        [
            group,
            sum(cell["linears"] for cell in of_kind),
            method,
            form,
            size or "-",
            _spell_mean(of_kind, "loss_before"),
            _spell_mean(of_kind, "loss_after"),
        ]
        for (group, method, form, size), of_kind in kinds.items()
    ]
    note = "mean squared error of the outputs over the squared outputs, before and after the search"
    columns = ["scale group", "linears", "method", "format", "group size", "error before", "error after"]
    return [{"title": "What was quantized", "note": note, "columns": columns, "rows": rows}] if rows else []


def _spell_mean(cells: Sequence[Document], key: str) -> str:
    mean = mean_loss(cells, key)
    return "not measured" if mean is None else spell_number(mean, ".3g")
