"""What a supervisor does before there is a server to supervise; the rest is tested with a package, end to end."""

import os
import socket

import pytest

from pipeline.triton.addresses import Addresses
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import find_installation
from pipeline.triton.server import TritonServer
from pipeline.triton.supervisor import Patience, Supervisor


def test_a_taken_http_port_is_named_and_nothing_of_the_current_folder_is_removed(tmp_path, monkeypatch):
    (tmp_path / "precious").touch()
    monkeypatch.chdir(tmp_path)

    def make_server(addresses):
        return TritonServer(
            find_installation(), repository=tmp_path, backends=[], log=tmp_path / "log", addresses=addresses
        )

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        supervisor = Supervisor(
            make_server, addresses=Addresses(http=port), max_bytes=1000, patience=Patience(), say=lambda _: None
        )
        with pytest.raises(ServerError, match=f"127.0.0.1:{port} cannot be listened on"):
            supervisor.start()
        supervisor.close()
    assert os.listdir() == ["precious"]
