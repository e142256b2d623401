"""trtseek serve CONFIG: a Triton server on what `engine` made."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import OutputFile, Seconds, config_argument, read_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.triton.package import Rehearsal
    from pipeline.triton.server import TritonServer
    from pipeline.triton.supervisor import Supervisor

MEGABYTE = 1 << 20


@click.command(name="serve")
@config_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=8002, show_default=True)
@click.option("--max-request-mb", type=click.IntRange(1, 2047), default=16, show_default=True, help="Largest request.")
@click.option("--grace", type=Seconds(), default=30.0, show_default=True, help="Seconds for requests at the end.")
@click.option(
    "--log",
    type=OutputFile(),
    help="Triton's log; else serve.log beside the package, or the next of its name that no other server writes.",
)
@click.option("--tritonserver", type=click.Path(path_type=Path), help="The server to run; else the one on PATH.")
@click.option("--check", is_flag=True, help="Load the package, send one request, and exit.")
@click.option(
    "--rehearse",
    is_flag=True,
    help="Of a package for NVIDIA's image: serve it here, the interpreter in the place of TensorRT-LLM's engine.",
)
def command(
    config_file: str,
    overrides: tuple[str, ...],
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    max_request_mb: int,
    grace: float,
    log: Path | None,
    tritonserver: Path | None,
    check: bool,
    rehearse: bool,
) -> None:
    """Serve a package with Triton Inference Server until Ctrl-C or SIGTERM.

    CONFIG is a config, whose package is made first if it is not there, or the folder of a package. It is ready once a
    first request has been answered; then GET /v2/health/ready says 200 at the HTTP port. Models whose process dies are
    loaded again. At the end, requests in flight are finished within --grace seconds.
    """
    from pipeline.triton.addresses import Addresses
    from pipeline.triton.canary import check_package
    from pipeline.triton.footprint import estimate_memory
    from pipeline.triton.installation import find_installation
    from pipeline.triton.package import find_package
    from pipeline.triton.server_log import claim_log
    from pipeline.triton.serving_memory import compare_with_free
    from pipeline.triton.supervisor import Patience, Supervisor

    installation = find_installation(tritonserver)
    package, default_log, rehearsal = _find(config_file, overrides, rehearse)
    found = find_package(package)
    log = click.get_current_context().with_resource(claim_log(log or default_log, is_given=log is not None))
    if check:
        result = check_package(package, log=log, installation=installation, rehearsal=rehearsal)
        click.echo(f"{package}: models loaded in {result.loaded:.1f} s, a request answered in {result.answered:.2f} s")
        return

    def make_server(addresses: Addresses) -> TritonServer:
        assert log is not None
        return found.make_server(installation, log=log, rehearsal=rehearsal, addresses=addresses, grace=grace)

    supervisor = Supervisor(
        make_server,
        addresses=Addresses(host=host, metrics_host=host, http=http_port, grpc=grpc_port, metrics=metrics_port),
        max_bytes=max_request_mb * MEGABYTE,
        patience=Patience(grace=grace),
        say=_say,
    )
    memory, fits = compare_with_free(estimate_memory(found, rehearsal))
    _say(f"starting Triton on {package}: {memory}; log: {log}")
    if not fits:
        _say(
            "  that may be too little: free some, or lower stages.package.max_tokens_in_paged_kv_cache or the number "
            "of instances"
        )
    _run(supervisor)


def _find(config_file: str, overrides: Sequence[str], rehearse: bool) -> tuple[Path, Path, Rehearsal | None]:
    """The package, made if need be, where its server's log goes, and what stands in for an engine of TensorRT-LLM's."""
    from pipeline.triton.emission import REPOSITORY
    from pipeline.triton.package import Rehearsal

    folder = Path(config_file)
    if (folder / REPOSITORY).is_dir():
        if rehearse:
            raise click.UsageError("--rehearse needs the config, which has the checkpoint: a package has not")
        return folder, folder.resolve().parent / "serve.log", None
    from pipeline.cli.source import check_source
    from pipeline.progress import make_reporter
    from pipeline.stages.executor import Executor
    from pipeline.stages.graph import load_stages
    from pipeline.stages.network import built_checkpoint

    config = read_config(config_file, overrides)
    check_source(config)
    if rehearse and config.target.world.flavour != "tensorrtllm":
        raise click.UsageError(f"--rehearse is for target.backend tensorrt_llm, and this is {config.target.backend}")
    made = Executor(config, load_stages(), make_reporter()).run()
    rehearsal = Rehearsal(checkpoint=built_checkpoint(made), mode="fast") if rehearse else None
    return made["package"].path, (config.run_folder / "serve.log").resolve(), rehearsal


def _run(supervisor: Supervisor) -> None:
    import signal

    def stop(number: int, _: object) -> None:
        if supervisor.stop():
            with contextlib.suppress(Exception):  # it may have interrupted whoever writes there
                _say("asked again: requests in flight are ended")
            raise SystemExit(128 + number)

    try:
        supervisor.start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        address, grpc, http = supervisor.server.addresses, supervisor.grpc, supervisor.http
        places = {
            "gRPC": f"{grpc.host}:{grpc.port}",
            "HTTP": f"{http.host}:{http.port}",
            "metrics": f"{address.metrics_host}:{address.metrics}",
        }
        click.echo("ready: " + ", ".join(f"{what} at {place}" for what, place in places.items()))
        supervisor.run()
        _say("stopping")
    finally:
        supervisor.close()


def _say(text: str) -> None:
    """On stderr. A server does not end because that is full, or nobody reads it any more."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)
