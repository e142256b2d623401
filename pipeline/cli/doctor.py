"""trtseek doctor: what this machine has, and what that means for a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pipeline.cli.options import json_option, print_json
from pipeline.cli.tables import print_table


@click.command(name="doctor")
@click.option("--output", type=click.Path(path_type=Path), default=Path("out"), help="Where results would go.")
@json_option
@click.pass_context
def command(context: click.Context, output: Path, as_json: bool) -> None:
    """Look at the machine: Python, libraries, processor, memory, disk, GPU, TensorRT, Triton.

    One line each, with a verdict and what to do. Leaves with 1 where something is missing that a run needs.
    """
    from pipeline.cli.checkup import check_all

    findings = check_all(output)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        rows: list[tuple[str, ...]] = []
        for finding in findings:
            rows.append((finding.verdict, finding.subject, finding.found))
            rows += [("", "", finding.advice)] if finding.advice else []
        print_table(rows)
    if any(finding.verdict == "failed" for finding in findings):
        context.exit(1)
