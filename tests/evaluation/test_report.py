"""The page in a real browser: complete, quiet, self-contained, and fit for a phone, a dark room and paper."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation.numbers import spell_numbers
from pipeline.evaluation.report.figures import mean_loss, plot_coverage, plot_experts, plot_linears, plot_saturation
from pipeline.evaluation.report.page import write_comparison, write_run
from tests.browser import NoBrowserError, Page, find_chromium, open_page

HOSTILE = '<script>alert("$x_1$")</script>&\u65e5'
LONG = "transformer.layers." * 12


def row(label: str, kl: float, **changes: Any) -> dict[str, Any]:
    layers = [
        {"layer": i, "error": kl * (i + 1), "cosine": 1 - kl, "kl": kl, "top1": 0.9, "top5": 0.9, "lens_positions": 68}
        for i in range(4)
    ]
    span = {"tokens": 100, "nll": 3.0, "entropy": 3.0 + kl, "kl": kl, "top1": 0.9, "top5": 0.9}
    task = {"items": 4, "solved": 3, "normalised": 2, "accuracy": 0.75, "accuracy_normalised": 0.5}
    return {
        "label": label,
        "tokens": 1000,
        "bytes": 12_000_000,
        "perplexity": 20.0 + kl,
        "perplexity_ratio": 1 + kl / 20,
        "mean_kl": kl,
        "max_kl": 5 * kl,
        "top1_agreement": 1 - kl,
        "top5_overlap": 1 - kl,
        "layers": layers,
        "positions": [{"first": 0, "last": 2**i, **span} for i in range(4, 9)],
        "context": [{"length": length, **span} for length in (256, 1024, 8192)],
        "accuracy": {"items": 4, "accuracy": 0.75, "tasks": {HOSTILE: task}},
        **changes,
    }


def sample() -> dict[str, Any]:
    versions = [
        {"label": "original", "text": "abc def", "agreed": "abc def", "first_difference": None},
        {"label": HOSTILE, "text": "abc <b>xyz</b>", "agreed": "abc ", "first_difference": 1},
    ]
    return {"prompt": HOSTILE + "x" * 300, "kl": 0.5, "checkpoint": HOSTILE, "continuations": versions}


def run_document() -> dict[str, Any]:
    gates = [
        {
            "name": f"gate_{i}@8192",
            "value": value,
            "bound": bound,
            "relation": "<=",
            "passed": passed,
            "meaning": HOSTILE,
            "blame": LONG,
        }
        for i, (value, bound, passed) in enumerate([(1.00099, 1.001, True), ("nan", 0.2, False), (None, None, None)])
    ]
    cells = [
        {
            "layer": layer,
            "group": group,
            "linears": 2,
            "method": "awq",
            "format": "int4",
            "group_size": 32 if layer < 10 else 128,
            "alpha": 0.5,
            "clipped": 0.5,
            "loss_before": 0.002 * layer + 0.002,
            "loss_after": 0.001 * layer + 0.001 if layer else None,
        }
        for layer in range(30)
        for group in ("attention.dense", "mlp.experts.*.fc")
    ]
    unmeasured = {"loss_before": None, "loss_after": None}
    cells.append({**cells[0], "layer": None, "group": "lm_head", "format": "int8_of_the_head", **unmeasured})
    coverage = {"layers": {str(layer): {"mlp.fc": {"score": 0.9, "change": 0.01 * layer}} for layer in range(30)}}
    saturation = [{"share": share, "mean": 0.01 / share, "largest": 0.02 / share} for share in (1 / 8, 1 / 4, 1 / 2)]
    network = {
        "positions": 95,
        "steps": 13,
        "left_out": 0,
        "layer_errors": [1e-5, "inf"],
        "declared_layer_errors": [1e-3, 2e-3],
    }
    return {
        "key": "blake3:00",
        "name": HOSTILE,
        "subtitle": LONG,
        "stages": [
            {"name": "convert", "seconds": 3.5, "bytes": 10**7, "state": ""},
            {"name": "verify", "seconds": 90.0, "bytes": 0, "state": "failed"},
        ],
        "sizes": [{"name": "source", "bytes": 10**10}, {"name": "engine", "bytes": 3 * 10**9}],
        "complete": False,
        "verify": {
            "gates": gates,
            "network": network,
            "quality": {
                "checkpoints": [
                    row("original", 0.0, baseline_share=0.0),
                    row("quantized", 0.02, baseline_share=0.36),
                ],
                "baseline": row("round to nearest (baseline)", 0.05, baseline_share=1.0),
                "samples": [sample()] * 3,
            },
        },
        "quantization": {
            "ratio": 0.5,
            "linears_ratio": 0.28,
            "heat_map": cells,
            "coverage": coverage | {"saturation": saturation},
            "experts": {"1": {"tokens": [5, 0, 3, 8]}, "2": {"tokens": [4, 4, 4, 4]}},
        },
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    write_run(run_document(), folder / "run.html")
    rows = [row("original", 0.0), row(LONG, 0.01), row(HOSTILE, math.nan, perplexity=math.inf)]
    write_comparison(spell_numbers({"checkpoints": rows, "samples": [sample()]}), folder / "compare.html")
    return {path.stem: path for path in folder.iterdir()}


async def look(page: Page, path: Path) -> dict[str, Any]:
    """What the browser sees at the width of a phone, of a desk and on paper."""
    await page.open(path, 360)
    seen: dict[str, Any] = {"phone": await page.evaluate(OVERFLOW)}
    await page.resize(1280)
    seen["desk"] = await page.evaluate(OVERFLOW)
    counts = "['table', 'figure svg', 'tr', 'mark', 'script'].map(s => document.querySelectorAll(s).length)"
    seen["tables"], seen["plots"], seen["rows"], seen["marks"], seen["scripts"] = await page.evaluate(counts)
    seen["text"] = await page.evaluate("document.body.innerText")
    seen["colours"] = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await page.call("Emulation.setEmulatedMedia", features=features)
        seen["colours"][scheme] = await page.evaluate(COLOURS)
    seen["pdf"] = await page.print_pdf()
    return seen


# How far the page is wider than the screen, and the elements beyond its edge that do not scroll by themselves.
OVERFLOW = """[document.documentElement.scrollWidth - innerWidth,
 [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
   && !e.closest('.scroll')).map(e => e.tagName + '.' + e.className)]"""
COLOURS = """['body', 'figure svg text'].map(s => { const style = getComputedStyle(document.querySelector(s));
 return [style.backgroundColor, s == 'body' ? style.color : style.fill] })"""


@pytest.fixture(scope="module")
def seen(pages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    async def visit() -> dict[str, Any]:
        found: dict[str, Any] = {}
        async with open_page(tmp_path_factory.mktemp("browser")) as page:
            for name, path in pages.items():
                found[name] = await look(page, path)
            found["requests"], found["errors"] = page.requests, page.errors
        return found

    try:
        find_chromium()
    except NoBrowserError as reason:
        pytest.skip(str(reason))
    return asyncio.run(visit())


def test_nothing_is_asked_of_the_network_and_nothing_is_complained_of(seen: dict[str, Any]) -> None:
    assert {url.partition(":")[0] for url in seen["requests"]} == {"file", "data"}
    assert len([url for url in seen["requests"] if url.startswith("file:")]) == 2  # the pages themselves
    assert seen["errors"] == []


@pytest.mark.parametrize("name", ["run", "compare"])
def test_a_page_is_never_wider_than_its_screen(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["phone"] == [0, []]
    assert seen[name]["desk"] == [0, []]


def test_everything_is_there(seen: dict[str, Any]) -> None:
    run, compare = seen["run"], seen["compare"]
    assert (run["tables"], run["plots"], run["marks"]) == (5, 9, 3)
    assert (compare["tables"], compare["plots"], compare["marks"]) == (2, 5, 1)
    assert run["rows"] == (1 + 3) + (1 + 3) + (1 + 5) + (1 + 1) + (1 + 2)  # gates, checkpoints, groups, tasks, layers
    for words in (
        "1 of 2 gates failed: gate_1@8192; 1 off",
        "1.00099\t≤ 1.001",
        "3.5 s, 10 MB of files",
        "90.0 s (failed)",
        "10 GB",
        "28.0%\nof the quantized linears' 16-bit size",
        "50.0%\nof the whole checkpoint's size",
        "group size",
        "int8_of_the_head",
        f"KL 0.5 nats, of {HOSTILE}",
        "of what final norm and head read in each layer, at a sample of 68 positions",
        "not measured",
        "inf",
    ):
        assert words in run["text"], words
    for words in ("round to nearest (baseline)", "loss / baseline's", "0.36"):
        assert words in run["text"] and words not in compare["text"], words
    assert "3 checkpoints compared" in compare["text"]


def test_what_comes_from_outside_is_text(seen: dict[str, Any]) -> None:
    for name in ("run", "compare"):
        assert seen[name]["scripts"] == 0
        assert HOSTILE in seen[name]["text"]
        assert "<b>xyz</b>" in seen[name]["text"]


def test_light_and_dark_turn_paper_and_ink_plots_included(seen: dict[str, Any]) -> None:
    light, dark = (seen["run"]["colours"][scheme] for scheme in ("light", "dark"))
    assert light[0] == ["rgb(255, 255, 255)", "rgb(27, 35, 48)"]
    assert dark[0] == ["rgb(17, 21, 27)", "rgb(230, 234, 240)"]
    assert light[1][1] == light[0][1]
    assert dark[1][1] == dark[0][1]


def test_it_prints(seen: dict[str, Any]) -> None:
    pdf = seen["run"]["pdf"]
    assert pdf.startswith(b"%PDF-")
    assert pdf.rstrip().endswith(b"%%EOF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") >= 2


def test_the_same_document_gives_the_same_page(pages: dict[str, Path], tmp_path: Path) -> None:
    write_run(run_document(), tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == pages["run"].read_bytes()


def test_plots_leave_out_what_is_not_there() -> None:
    assert plot_linears([]) is None
    assert plot_linears([{"group": "mlp.fc", "layer": 0, "linears": 1, "loss_after": None}]) is None
    assert plot_experts({}) is None
    assert plot_coverage({}) is None
    assert plot_saturation([]) is None


def test_a_mean_is_of_the_linears() -> None:
    """Of 64 experts a recipe gave one another group size, and one had no tokens."""
    cells = [{"linears": 62, "loss": 0.01}, {"linears": 1, "loss": 0.64}, {"linears": 1, "loss": None}]
    assert mean_loss(cells, "loss") == pytest.approx((62 * 0.01 + 0.64) / 63)
    assert mean_loss(cells[2:], "loss") is None


def test_a_large_heat_map_is_one_picture() -> None:
    small = plot_experts({str(layer): {"tokens": [*range(8)]} for layer in range(3)})
    large = plot_experts({str(layer): {"tokens": [*range(256)]} for layer in range(58)})
    assert small is not None and large is not None
    assert large.svg.count("<path") < 200 and len(large.svg) < 300_000
    assert large.svg.count("data:image/png") == 1 + small.svg.count("data:image/png")  # the bar of colours is one, too


def test_the_page_of_a_first_stage_alone(tmp_path: Path) -> None:
    document = run_document() | {"verify": None, "quantization": None}
    write_run(document, tmp_path / "first.html")
    text = (tmp_path / "first.html").read_text()
    assert "not verified" in text
    assert json.dumps(document["key"]) in text
