"""A model of two ranks in a real tritonserver: the stub leads, a process of its own follows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.runtime.errors import ServingError
from pipeline.triton.client import Client
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import find_installation
from pipeline.triton.processes import is_alive
from pipeline.triton.query import Query
from pipeline.triton.server import TritonServer
from tests.serving.support import Served, make_config, serve_package

PROMPTS = [[5, 6, 7, 8, 9], list(range(60, 100)), [3]]
NEW = 16


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory, llama_path: Path) -> Served:
    config = make_config("halved", parallel={"tensor": 2})
    return serve_package(tmp_path_factory.mktemp("halved") / "llama", llama_path, config)


@pytest.fixture(scope="module")
def pair(halved: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    server = TritonServer(
        find_installation(),
        repository=halved.repository.path,
        backends=[halved.repository.backends],
        log=tmp_path_factory.mktemp("pair") / "server.log",
        grace=5,
    )
    with server:
        server.start(deadline=240)
        yield server


def find_followers() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"pipeline.runtime.rank_process" in command and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def ask(server: TritonServer, prompt: list[int]) -> list[int]:
    with Client(f"127.0.0.1:{server.addresses.grpc}") as client:
        return client.ask(Query(input_ids=prompt, options={"max_tokens": NEW, "end_id": -1}), timeout=120).output_ids


def test_two_ranks_answer_as_one(pair: TritonServer, halved: Served) -> None:
    assert [ask(pair, prompt) for prompt in PROMPTS] == halved.generate(PROMPTS, NEW)


def test_a_package_lists_every_ranks_engine(halved: Served) -> None:
    engine = halved.repository.artifacts["engine"]
    names = {str(path.relative_to(engine)) for path in engine.rglob("*") if path.is_file()}
    ranks = {f"rank{rank}/{name}" for rank in (0, 1) for name in ("model.engine", "engine.json")}
    assert names == {"engine.json", *ranks}


def test_a_rank_that_dies_fails_requests_and_does_not_hang_them(pair: TritonServer) -> None:
    """The last test of this server: it is loaded again by `serve`, as one whose backend died."""
    mine = [pid for pid in find_followers() if is_below(pid, pair)]
    assert len(mine) == 1
    os.kill(mine[0], signal.SIGKILL)
    with pytest.raises((ServingError, ServerError)) as caught:
        ask(pair, PROMPTS[0])
    assert "rank 1" in str(caught.value)
    pair.stop()
    end = time.monotonic() + 20
    while is_alive(mine[0]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_alive(mine[0])


def is_below(pid: int, server: TritonServer) -> bool:
    """Whether the process was started by one of the server's stubs."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1]) in server.stubs
