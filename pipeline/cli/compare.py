"""trtseek compare A B [C…]: what quantization or conversion cost, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import OutputFile, json_option, print_json
from pipeline.cli.tables import format_bytes, print_table, print_title

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HELDOUT = "checkpoints/text/heldout.txt"


def _parse_lengths(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in value.split(",") if part.strip())
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of numbers, as 256,1024,4096 is") from error
    if any(length < 2 for length in lengths):
        raise click.BadParameter("a context has at least 2 tokens")
    return lengths


@click.command(name="compare")
@click.argument("checkpoints", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="A B [C]...")
@click.option(
    "--text", "texts", multiple=True, type=click.Path(path_type=Path), help=f"Held-out text, UTF-8. Default: {HELDOUT}."
)
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(2), help="How many tokens are scored.")
@click.option("--window", default=256, show_default=True, type=click.IntRange(2), help="Tokens per piece of text.")
@click.option(
    "--context",
    "lengths",
    default="",
    callback=_parse_lengths,
    metavar="N,N,…",
    help="Also measure drift over contexts of these lengths, e.g. 256,1024,4096,8192.",
)
@click.option("--tasks", multiple=True, type=click.Path(path_type=Path), help="Also solve the tasks of a JSONL file.")
@click.option(
    "--prompts",
    default=0,
    type=click.IntRange(0, 64),
    help="Also continue the N worst prompts: text up to where any checkpoint's KL is largest.",
)
@click.option("--baseline/--no-baseline", default=True, show_default=True, help="Also round the first to nearest.")
@click.option("--report", type=OutputFile(), metavar="FILE", help="Write the result as an HTML page too.")
@json_option
def command(
    checkpoints: tuple[Path, ...],
    texts: tuple[Path, ...],
    tokens: int,
    window: int,
    lengths: tuple[int, ...],
    tasks: tuple[Path, ...],
    prompts: int,
    baseline: bool,
    report: Path | None,
    as_json: bool,
) -> None:
    """Measure checkpoints against the first of them.

    Each is a Hugging Face folder, an engine checkpoint (out/NAME/convert, out/NAME/quantize), or a run's folder, which
    stands for both. All run in lockstep over the same text, one decoder layer of each in memory: perplexity, KL
    divergence, stability of the most likely tokens, per position and, at a sample of the positions, per layer. The
    baseline is the first's weights rounded to nearest, in the formats of the last that this project quantized.
    """
    from pipeline.evaluation.comparison import Plan, compare_subjects
    from pipeline.evaluation.finiteness import require_finite
    from pipeline.evaluation.numbers import spell_numbers
    from pipeline.evaluation.subject import open_subjects
    from pipeline.progress import make_reporter

    subjects = open_subjects(checkpoints)
    plan = Plan(
        files=texts or (Path(HELDOUT),),
        tokens=tokens,
        window=window,
        lengths=lengths,
        tasks=tasks,
        continuations=prompts,
        baseline=baseline,
    )
    comparison = compare_subjects(subjects, plan, make_reporter())
    document = spell_numbers(comparison.to_json())
    if report is not None:
        from pipeline.evaluation.report.page import write_comparison

        write_comparison(document, report)
    if as_json:
        print_json(document)
    else:
        _print(document, prompts)
    if report is not None:
        click.echo(f"report: {report}", err=True)
    require_finite(subjects, comparison.quality)


def _number(digits: str) -> Callable[[Any], str]:
    return lambda value: value if isinstance(value, str) else format(value, digits)


def _share(value: Any) -> str:
    """None where the baseline loses nothing."""
    return "-" if value is None else _number(".2f")(value)


# Figure -> how its column is headed and spelled.
COLUMNS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("bytes", "weights", format_bytes),
    ("perplexity", "perplexity", _number(".3f")),
    ("perplexity_ratio", "ratio", _number(".4f")),
    ("mean_kl", "mean KL", _number(".3g")),
    ("max_kl", "max KL", _number(".3g")),
    ("top1_agreement", "top-1", _number(".2%")),
    ("top5_overlap", "top-5", _number(".2%")),
    ("baseline_share", "loss / baseline's", _share),
)


def _print(document: Mapping[str, Any], prompts: int) -> None:
    rows, baseline = document["checkpoints"], document["baseline"]
    columns = COLUMNS if baseline else COLUMNS[:-1]
    table = [["checkpoint", *(title for _, title, _ in columns)]]
    table += [[row["label"], *(spell(row[key]) for key, _, spell in columns)] for row in rows]
    if rows[0]["accuracy"]:
        solved = [f"{row['accuracy']['accuracy']:.1%}" for row in rows]
        table = [[*line, cell] for line, cell in zip(table, ["tasks", *solved], strict=True)]
    print_title(f"{rows[0]['tokens']} tokens against {rows[0]['label']}")
    if baseline:
        cells = ["" if key == "bytes" else spell(baseline[key]) for key, _, spell in columns]
        table.append([baseline["label"], *cells, *[""] * (len(table[0]) - len(cells) - 1)])
    print_table(table)
    others = rows[1:]
    _print_by(
        "layer: relative RMS error and cosine of its output; KL and top-1 of what norm and head read in it at a sample "
        f"of {rows[0]['layers'][0]['lens_positions']} positions",
        others,
        "layers",
        "layer",
        _spell_layer,
    )
    _print_by("positions: KL, top-1", others, "positions", "last", _spell_position)
    if rows[0]["context"]:
        _print_by("context: perplexity, entropy, KL", rows, "context", "length", _spell_context)
    if prompts and not document["samples"]:
        print_title("prompts: none, since nothing differs")
    for sample in document["samples"]:
        kl = _number(".3g")(sample["kl"])
        print_title(f"prompt with KL {kl} of {sample['checkpoint']}: {sample['prompt'][-60:]!r}")
        print_table([(version["label"], repr(version["text"][:80])) for version in sample["continuations"]])


def _print_by(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    section: str,
    key: str,
    spell: Callable[[Mapping[str, Any]], str],
) -> None:
    """A line per layer, position or length, and a column per checkpoint."""
    print_title(title)
    names = ["", *(row["label"] for row in rows)]
    lines = [[str(parts[0][key]), *map(spell, parts)] for parts in zip(*(row[section] for row in rows), strict=True)]
    print_table([names, *lines])


def _spell_layer(row: Mapping[str, Any]) -> str:
    states = f"{_number('.4f')(row['error'])}  {_number('.5f')(row['cosine'])}"
    return f"{states}  {_number('.2g')(row['kl'])}  {_number('.1%')(row['top1'])}"


def _spell_position(row: Mapping[str, Any]) -> str:
    return f"{_number('.3g')(row['kl'])}  {_number('.2%')(row['top1'])}"


def _spell_context(row: Mapping[str, Any]) -> str:
    from pipeline.evaluation.scores import perplexity

    nll = row["nll"]
    shown = nll if isinstance(nll, str) else f"{perplexity(nll):.2f}"
    return f"{shown}  {_number('.3f')(row['entropy'])}  {_number('.3g')(row['kl'])}"
