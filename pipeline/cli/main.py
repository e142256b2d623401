"""The `trtseek` command: one module per verb, imported when it is called, and one place where errors are shown.

Nothing heavy is imported at start, here or in the verbs' modules: `--help` must answer at once.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import click

import pipeline
from pipeline.errors import TrtseekError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

# GNU OpenMP's threads spin at barriers by default: two torch processes on the same cores then hold each other up. Read
# when torch loads the library, so set before any verb imports it.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

VERBS = (
    *("engine", "serve", "query", "plan", "status", "validate", "inspect"),
    *("sensitivity", "recipe"),
    *("verify", "compare", "report", "export", "refit", "explain", "diff", "gc", "doctor", "schema"),
)

# These end before there is garbage to speak of: collecting it would take a fifth of their time on the largest models.
QUICK = ("plan", "status", "validate", "schema", "explain")

# What these made until they were stopped is found again; the others begin anew.
RESUMED = ("engine", "serve", "verify", "sensitivity", "recipe")

# Beside those of pipeline.errors: what a shell reports for a signal, and sysexits' EX_SOFTWARE.
INTERRUPTED, TERMINATED, PIPE_CLOSED, BUG = 130, 143, 141, 70

# What the operating system says of a path that a user gave, which no verb foresaw.
REFUSALS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
# … and of what is written, most often to a pipe's or a redirection's end, when it is full: without a path.
FULL = (errno.ENOSPC, errno.EDQUOT)


_interrupts: list[int] = []  # the signals of every Ctrl-C that came


class _Verbs(click.Group):
    """Finds a verb in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"pipeline.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # Who read the output has seen enough. Python would complain again when it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pipeline.__version__, prog_name="trtseek", message="%(prog)s %(version)s")
def cli() -> None:
    """From a Hugging Face DeepSeek checkpoint to a proven, packaged TensorRT engine, from one YAML file."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and leaves with its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, _interrupt)
    if list(sys.argv[1:] if arguments is None else arguments)[:1] in [[verb] for verb in QUICK]:
        gc.disable()
    try:
        code = _run(list(arguments) if arguments is not None else None)
    except KeyboardInterrupt:  # a second Ctrl-C, while the first was being dealt with
        code = INTERRUPTED
    # What is left is Python's own end, which waits for threads: another Ctrl-C cuts it short, without a traceback.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def _run(arguments: list[str] | None) -> int:
    try:
        code = cli.main(arguments, prog_name="trtseek", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except TrtseekError as error:
        show_error(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _tell_interrupted(arguments)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except OSError as error:
        if error.errno in FULL:
            place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the output"
            show_error(
                TrtseekError(f"{place} cannot be written: {error.strerror}", hint="free some, or write elsewhere")
            )
            return TrtseekError.exit_code
        if not isinstance(error.filename, str | bytes) or error.errno not in REFUSALS:
            return _report_bug()
        path = os.fsdecode(error.filename)
        show_error(TrtseekError(f"{path}: {error.strerror}", hint="check the path, and who may read and write it"))
        return TrtseekError.exit_code
    except Exception:
        # An extension module that is being imported makes an ImportError of its own of a Ctrl-C.
        return _tell_interrupted(arguments) if _interrupts else _report_bug()


def _tell_interrupted(arguments: list[str] | None) -> int:
    verb = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    more = "; the same command goes on where this one stopped" if verb in RESUMED else ""
    click.echo(f"interrupted{more}", err=True)
    return INTERRUPTED


def _report_bug() -> int:
    traceback.print_exc()
    click.secho("\nThis is a bug in trtseek. Please report it, with the lines above.", fg="red", bold=True, err=True)
    return BUG


def show_error(error: TrtseekError) -> None:
    """One block on stderr: what is wrong, then what to do."""
    first, *rest = error.message.splitlines() or [""]
    click.echo(click.style("error: ", fg="red", bold=True) + click.style(first, fg="red"), err=True)
    for line in rest:
        click.secho(f"       {line}", fg="red", err=True)
    if error.hint:
        first, *rest = error.hint.splitlines()
        click.echo(click.style(" hint: ", bold=True) + first, err=True)
        for line in rest:
            click.echo(f"       {line}", err=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    signal.default_int_handler(number, frame)


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    # As an exception, so that stages end their child processes and the run is recorded as stopped.
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    main()
