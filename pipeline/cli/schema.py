"""trtseek schema: the JSON Schema of the config files."""

from __future__ import annotations

import click


@click.command(name="schema")
def command() -> None:
    """Print the JSON Schema of config files, for editors."""
    from pipeline.config.json_schema import render_schema

    click.echo(render_schema(), nl=False)
