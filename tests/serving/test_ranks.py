"""A model of two ranks in a real tritonserver: the stub leads, a process of its own follows."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.runtime.errors import ServingError
from pipeline.triton.addresses import Addresses
from pipeline.triton.client import Client
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import find_installation
from pipeline.triton.processes import is_alive
from pipeline.triton.query import Query
from pipeline.triton.server import TritonServer
from pipeline.triton.supervisor import Patience, Supervisor
from tests.serving.support import Served, make_config, serve_package

PROMPTS = [[5, 6, 7, 8, 9], list(range(60, 100)), [3]]
NEW = 16


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory, llama_path: Path) -> Served:
    config = make_config("halved", parallel={"tensor": 2})
    return serve_package(tmp_path_factory.mktemp("halved") / "llama", llama_path, config)


@pytest.fixture(scope="module")
def pair(halved: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """As `trtseek serve` keeps it, but that no canary is sent once it serves."""
    log = tmp_path_factory.mktemp("pair") / "server.log"

    def make_server(addresses: Addresses) -> TritonServer:
        return TritonServer(
            find_installation(),
            repository=halved.repository.path,
            backends=[halved.repository.backends],
            log=log,
            addresses=addresses,
        )

    supervisor = Supervisor(
        make_server,
        addresses=Addresses(),
        max_bytes=1 << 20,
        patience=Patience(start=240, every=3600, grace=5),
        say=lambda _: None,
    )
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.close()


def find_followers(server: TritonServer) -> list[int]:
    """The ranks that its stubs lead."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            try:
                command, stat = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
            except OSError:
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            if b"pipeline.runtime.rank_process" in command and parent in server.stubs:
                found.append(int(entry.name))
    return found


def ask(pair: Supervisor, prompt: list[int]) -> list[int]:
    with Client(f"127.0.0.1:{pair.grpc.port}") as client:
        return client.ask(Query(input_ids=prompt, options={"max_tokens": NEW, "end_id": -1}), timeout=120).output_ids


def test_two_ranks_answer_as_one(pair: Supervisor, halved: Served) -> None:
    assert [ask(pair, prompt) for prompt in PROMPTS] == halved.generate(PROMPTS, NEW)


def test_a_package_lists_every_ranks_engine(halved: Served) -> None:
    engine = halved.repository.artifacts["engine"]
    names = {str(path.relative_to(engine)) for path in engine.rglob("*") if path.is_file()}
    ranks = {f"rank{rank}/{name}" for rank in (0, 1) for name in ("model.engine", "engine.json")}
    assert names == {"engine.json", *ranks}


def test_a_rank_that_dies_fails_requests_and_the_model_is_loaded_again(pair: Supervisor, halved: Served) -> None:
    (dead,) = find_followers(pair.server)
    os.kill(dead, signal.SIGKILL)
    with pytest.raises((ServingError, ServerError), match="rank 1"):
        ask(pair, PROMPTS[0])
    pair.ready = False
    watch = threading.Thread(target=pair.run)
    watch.start()
    try:
        end = time.monotonic() + 240
        while not pair.ready and watch.is_alive() and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        pair.stop()
        watch.join()
    (follower,) = find_followers(pair.server)
    assert ask(pair, PROMPTS[1]) == halved.generate(PROMPTS[1:2], NEW)[0]
    pair.close()
    end = time.monotonic() + 20
    while (is_alive(dead) or is_alive(follower)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_alive(dead)
    assert not is_alive(follower)
