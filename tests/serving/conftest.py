"""One real server for all tests of this folder: it takes ten seconds to start, and each test leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.triton.client import Client
from pipeline.triton.installation import find_installation
from pipeline.triton.server import TritonServer
from tests.serving.support import Served, serve_package


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, llama_path) -> Served:
    return serve_package(tmp_path_factory.mktemp("served") / "llama", llama_path)


@pytest.fixture(scope="session")
def server(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = served.repository
    server = TritonServer(
        find_installation(),
        repository=repository.path,
        backends=[repository.backends],
        log=tmp_path_factory.mktemp("server") / "server.log",
        grace=5,
    )
    with server:
        server.start(deadline=240)
        yield server


@pytest.fixture(scope="session")
def url(server: TritonServer) -> str:
    return f"127.0.0.1:{server.addresses.grpc}"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client
