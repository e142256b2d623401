"""trtseek query PROMPT: ask a running server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import Seconds, json_option, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.triton.client import Answer
    from pipeline.triton.query import Query

DEFAULT_URL = "localhost:8001"
EXAMPLE = '{"prompt": "def f(", "max_tokens": 8, "parameters": {"priority_class": "P0"}}'


@click.command(name="query")
@click.argument("prompt", required=False)
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The server's gRPC address.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--temperature", type=float, help="0 is greedy. Without --top-k and --top-p, the best token is taken.")
@click.option("--top-k", type=int)
@click.option("--top-p", type=float)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1))
@click.option("--repetition-penalty", type=float)
@click.option("--stop", multiple=True, metavar="TEXT", help="Ends the answer before this text. May be repeated.")
@click.option("--chat", is_flag=True, help="PROMPT is what a user says: it goes through the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@click.option("--input-ids", metavar="IDS", help="Token ids, separated by commas, in the place of PROMPT.")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    help="One prompt a line; .jsonl: one object a line."
    " Its keys: prompt, messages or input_ids; stop, parameters, and options such as max_tokens.",
)
@click.option("--concurrency", type=click.IntRange(1, 256), default=4, show_default=True, help="With --file.")
@click.option("--priority", type=click.Choice(["P0", "P1", "P2"]), help="P0 comes first.")
@click.option("--timeout", type=Seconds(), help="Seconds that the whole answer may take.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is complete.")
@json_option
def command(
    prompt: str | None,
    url: str,
    stop: tuple[str, ...],
    chat: bool,
    system: str | None,
    input_ids: str | None,
    path: Path | None,
    concurrency: int,
    priority: str | None,
    timeout: float | None,
    no_stream: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Ask the server that `trtseek serve` runs, and print the answer as it comes.

    PROMPT is text; `-` reads it from standard input. With --file, many prompts are asked at a time, and the answers
    come in the order of the prompts. Token ids are answered with token ids.
    """
    given = {"PROMPT": prompt, "--input-ids": input_ids, "--file": path}
    if sum(value is not None for value in given.values()) != 1:
        raise click.UsageError("give one of PROMPT, --input-ids and --file")
    if chat and input_ids is not None:
        raise click.UsageError("--chat goes with text: token ids are asked as they are")
    if system is not None and not chat:
        raise click.UsageError("--system goes with --chat")
    from pipeline.triton.query import Query

    common: dict[str, Any] = {
        "options": {name: value for name, value in options.items() if value is not None},
        "stop": stop,
        "parameters": {"priority_class": priority} if priority else {},
        "stream": not no_stream,
        "ids": as_json,
    }

    def ask_for(text: str) -> dict[str, Any]:
        if not chat:
            return {"text": text}
        before = [{"role": "system", "content": system}] if system is not None else []
        return {"messages": [*before, {"role": "user", "content": text}]}

    if path is not None:
        queries = _read_file(path, ask_for, common)
        _ask_many(queries, url, concurrency, timeout, as_json)
        return
    if input_ids is not None:
        query = Query(**common, input_ids=_parse_ids(input_ids))
    else:
        query = Query(**common, **ask_for(sys.stdin.read() if prompt == "-" else str(prompt)))
    _ask_one(query, url, timeout, as_json)


def _ask_one(query: Query, url: str, timeout: float | None, as_json: bool) -> None:
    from pipeline.triton.client import Client

    def show(text: str) -> None:
        click.echo(text, nl=False)
        sys.stdout.flush()

    with Client(url) as client:
        answer = client.ask(query, on_text=None if as_json else show, timeout=timeout)
    if as_json:
        print_json(_to_json(answer))
    else:
        click.echo("" if query.input_ids is None else ",".join(map(str, answer.output_ids or ())))


def _ask_many(queries: Sequence[Query], url: str, concurrency: int, timeout: float | None, as_json: bool) -> None:
    """Prints each answer once it and all before it are there; as JSON, one object a line."""
    from pipeline.runtime.errors import ServingError
    from pipeline.triton.client import ask_all
    from pipeline.triton.errors import ServerError

    failures = 0
    for number, answer in enumerate(ask_all(queries, url=url, concurrency=concurrency, timeout=timeout)):
        if isinstance(answer, ServerError):
            raise answer  # nobody is there, or it hangs: the others would say the same
        if isinstance(answer, Exception):
            failures += 1
            document: Mapping[str, Any] = {"index": number, "error": str(answer)}
        else:
            document = {"index": number, **_to_json(answer)}
        if as_json:
            click.echo(json.dumps(document, ensure_ascii=False))
        else:
            click.echo(f"[{number}] {document.get('text') or document.get('output_ids') or document.get('error', '')}")
    if failures:
        raise ServingError(
            f"{failures} of {len(queries)} queries failed", hint="in the place of its answer each says why"
        )


def _to_json(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "output_ids": answer.output_ids,
        "num_input_tokens": answer.num_input_tokens,
        "num_output_tokens": answer.num_output_tokens,
        "time_to_first": answer.time_to_first,
        "seconds": answer.seconds,
    }


def _read_file(path: Path, ask_for: Any, common: Mapping[str, Any]) -> list[Query]:
    """A query for each line that is not empty. What is wrong with a line is told before any is asked."""
    from pipeline.runtime.errors import ServingError
    from pipeline.triton.query import Query

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint="--file") from None
    except UnicodeDecodeError:
        raise click.BadParameter(f"{path} is not UTF-8 text", param_hint="--file") from None
    queries = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                fields = _read_object(line, ask_for, common) if path.suffix == ".jsonl" else ask_for(line)
                queries.append(Query(**{**common, **fields}))
            except (ServingError, ValueError) as error:
                problem = error.message if isinstance(error, ServingError) else str(error)
                if isinstance(error, ServingError) and error.hint:
                    problem += f" ({error.hint})"
                raise click.UsageError(f"{path}:{number}: {problem}") from None
    if not queries:
        raise click.BadParameter(f"{path} holds no prompts", param_hint="--file")
    return queries


def _read_object(line: str, ask_for: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Query. An object holds `prompt`, `messages` or `input_ids`, and may hold options. Raises ValueError."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{error.msg} at column {error.colno}: a line of a .jsonl is a JSON object, such as {EXAMPLE}; "
            "one prompt a line, as plain text, is what a file of another name holds"
        ) from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError(f"is not a JSON object, such as {EXAMPLE}")
    fields = {name: entry.pop(name) for name in ("messages", "input_ids", "stop", "parameters") if name in entry}
    text = entry.pop("prompt", entry.pop("text", None))
    if text is None and not fields.keys() & {"messages", "input_ids"}:
        keys = ", ".join(sorted((*entry, *fields))) or "none"
        raise ValueError(f"an object has one of prompt, messages and input_ids; its keys: {keys}")
    return {**(ask_for(text) if text is not None else {}), **fields, "options": {**common["options"], **entry}}


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers", param_hint="--input-ids") from None
