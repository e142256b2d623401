"""A real tritonserver, over a model small enough to load in a moment, which tells what its process is like."""

import contextlib
import dataclasses
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from pipeline.triton import installation as installations
from pipeline.triton import kept, shortage
from pipeline.triton.addresses import Addresses
from pipeline.triton.errors import ServerError
from pipeline.triton.installation import find_installation
from pipeline.triton.keeper import FOLDER, OWNER, Overdue, claim, find_awaited
from pipeline.triton.processes import PREFIX, is_alive, remove_remains
from pipeline.triton.server import TritonServer

ROOT = Path(installations.__file__).parents[2]
PROBE = """
import json, os, sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        import pipeline
        found = {
            "prefix": sys.prefix, "version": sys.version, "pipeline": pipeline.__file__, "numpy": np.__version__,
            "path": sys.path,
        }
        report = pb_utils.Tensor("report", np.array([json.dumps(found).encode()], np.object_))
        return [pb_utils.InferenceResponse([report]) for _ in requests]
"""
CONFIG = """
name: "probe"
backend: "BACKEND"
input { name: "x" data_type: TYPE_INT32 dims: [1] }
output { name: "report" data_type: TYPE_STRING dims: [1] }
instance_group { kind: KIND_CPU }
"""


def write_probe(folder, *, code=PROBE, backend="python"):
    """A repository of one model, and a folder of backends: with `backend`, the code is a Python-based one."""
    model, backends = folder / "models" / "probe", folder / "backends"
    (model / "1").mkdir(parents=True)
    backends.mkdir()
    (model / "config.pbtxt").write_text(CONFIG.replace("BACKEND", backend))
    place = model / "1" if backend == "python" else backends / backend
    place.mkdir(exist_ok=True)
    (place / "model.py").write_text(code)
    return {"repository": folder / "models", "backends": [backends]}


def ask(server):
    body = json.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]}).encode()
    url = f"http://127.0.0.1:{server.addresses.http}/v2/models/probe/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
        return json.loads(json.loads(answer.read())["outputs"][0]["data"][0])


def make(folder, installation=None, **options):
    probe = write_probe(folder, **options)
    return TritonServer(installation or find_installation(), **probe, log=folder / "log", grace=1)


def memory(server):
    return list(Path("/dev/shm").glob(f"{server.prefix}*"))


def test_a_stub_runs_this_python_and_finds_this_project(tmp_path):
    server = make(tmp_path)
    with server:
        server.start(deadline=120)
        found = ask(server)
        assert memory(server)
        pid, stubs = server.pid, server.stubs
        assert len(stubs) == 1
    assert (found["prefix"], found["version"]) == (sys.prefix, sys.version)
    assert Path(found["pipeline"]) == ROOT / "pipeline" / "__init__.py"
    assert found["numpy"] < "2"
    assert [path.name for path in (tmp_path / "models" / "probe" / "1").iterdir()] == ["model.py"]
    assert not any(map(is_alive, [pid, *stubs]))
    assert memory(server) == []


def test_what_python_path_names_is_found_though_the_stub_ignores_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    with make(tmp_path) as server:
        server.start(deadline=120)
        path = ask(server)["path"]
    first = path.index(str(tmp_path / "more"))
    assert all("site-packages" not in folder for folder in path[:first])  # where another trtseek may be installed


def test_a_python_based_backend(tmp_path):
    with make(tmp_path, backend="mine") as server:
        server.start(deadline=120)
        assert ask(server)["prefix"] == sys.prefix


@pytest.fixture
def system(tmp_path):
    """A tritonserver laid out as in NVIDIA's image, whose binary needs nothing of the environment."""
    wheel = find_installation()
    root = tmp_path / "opt" / "tritonserver"
    (root / "bin").mkdir(parents=True)
    shutil.copytree(wheel.python_backend, root / "backends" / "python")
    shutil.copy(wheel.stub, root / "backends" / "python")
    binary = root / "bin" / "tritonserver"
    libraries = ":".join(map(str, wheel.libraries))
    binary.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}:$LD_LIBRARY_PATH" exec {wheel.binary} "$@"\n')
    binary.chmod(0o755)
    return binary


def test_a_system_installation_is_taken_from_path(tmp_path, system, monkeypatch):
    monkeypatch.setenv("PATH", str(system.parent), prepend=os.pathsep)
    found = find_installation()
    assert (found.binary, found.caches, found.libraries) == (system.resolve(), None, ())
    (tmp_path / "probe").mkdir()
    with make(tmp_path / "probe", found, backend="mine") as server:
        server.start(deadline=120)
        report = ask(server)
    assert (report["prefix"], report["version"]) == (sys.prefix, sys.version)


@pytest.mark.parametrize(("words", "starts"), [("boost::interprocess::lock_exception", 2), ("std::bad_alloc", 1)])
def test_a_start_that_a_busy_machine_made_triton_abort_is_made_again(tmp_path, words, starts):
    """Any other end at the start is told."""
    found = find_installation()
    binary, count = tmp_path / "tritonserver", tmp_path / "count"
    abort = f"echo \"terminate called after throwing an instance of '{words}'\" >&2; kill -ABRT $$"
    once = f"echo x >> {count}; [ $(wc -l < {count}) -gt 1 ] || {{ {abort}; }}"
    binary.write_text(f'#!/bin/sh\n{once}\nexec {found.binary} "$@"\n')
    binary.chmod(0o755)
    (tmp_path / "probe").mkdir()
    with make(tmp_path / "probe", dataclasses.replace(found, binary=binary)) as server:
        if starts == 1:
            with pytest.raises(ServerError, match=f"ended at its start\n.*{words}"):
                server.start(deadline=120)
        else:
            server.start(deadline=120)
            assert ask(server)["prefix"] == sys.prefix
    assert count.read_text() == "x\n" * starts


def test_a_stub_of_another_python_is_refused(system):
    stub = system.parents[1] / "backends" / "python" / installations.STUB
    stub.write_bytes(stub.read_bytes().replace(b"libpython3.11", b"libpython3.99"))
    with pytest.raises(ServerError, match=r"built for Python 3\.99") as caught:
        find_installation(system)
    assert "python3.99" in caught.value.hint


def test_a_server_without_a_python_backend_is_refused(system):
    shutil.rmtree(system.parents[1] / "backends" / "python")
    with pytest.raises(ServerError, match=r"libtriton_python\.so is missing"):
        find_installation(system)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ServerError, match="/none is missing"):
        find_installation(Path("/none"))


def test_without_any_server_it_is_said_how_to_get_one(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(installations, "WHEEL", "no-such-wheel")
    with pytest.raises(ServerError, match="no tritonserver on PATH") as caught:
        find_installation()
    assert "pip install no-such-wheel" in caught.value.hint


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no luck today')", "no luck today"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('bad weights')",
            "bad weights",
        ),
        ("import nothing_of_the_kind", "nothing_of_the_kind"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(tmp_path, code, reason):
    server = make(tmp_path, code=code)
    with server, pytest.raises(ServerError, match=f"probe cannot be loaded: .*{reason}"):
        server.start(deadline=120)
    assert memory(server) == []


KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
NO_ROOM = "import sys\nprint('MemoryError: no room', file=sys.stderr, flush=True)\n"


@pytest.mark.parametrize("code", [NO_ROOM + KILLED, "raise MemoryError('no room')"])
def test_a_model_that_says_that_memory_ran_out_is_not_tried_again(tmp_path, code):
    """Triton says of its process what it says of one that was slow. What to lower is said, and nothing is left."""
    server = make(tmp_path, code=code)
    began = time.monotonic()
    with server, pytest.raises(ServerError, match=r"(?s)probe cannot be loaded: .*memory ran out") as caught:
        server.start(deadline=240)
    assert time.monotonic() - began < 120
    assert (
        "lower stages.package.max_tokens_in_paged_kv_cache" in caught.value.hint
        and str(server.log) in caught.value.hint
    )
    assert memory(server) == []


def test_a_model_is_tried_again_though_the_kernel_killed_a_process(tmp_path, monkeypatch):
    """Which may have been a neighbour's: it says only that one was, of any on this host."""
    killed = itertools.chain([0, 0], itertools.repeat(1))
    monkeypatch.setattr(shortage, "count_kills", lambda: next(killed))
    once = f"import pathlib\nmark = pathlib.Path({str(tmp_path / 'mark')!r})\nif not mark.exists():\n    mark.touch()\n"
    with make(tmp_path, code=f"{once}    {'; '.join(KILLED.splitlines())}\n{PROBE}") as server:
        server.start(deadline=120)
        assert ask(server)["prefix"] == sys.prefix
        assert server.shortage.describe() == "the kernel killed 1 process(es) meanwhile because memory ran out"
        server.shortage.renew()
        assert server.shortage.describe() == ""


def test_a_model_that_the_kernel_kills_each_time_is_given_up(tmp_path, monkeypatch):
    """Nothing in its log says why: what the kernel counts is all that is known of it."""
    starts = tmp_path / "starts"
    monkeypatch.setattr(shortage, "count_kills", lambda: len(starts.read_bytes()) if starts.exists() else 0)
    server = make(tmp_path, code=f"open({str(starts)!r}, 'a').write('x')\n{KILLED}")
    said = r"probe cannot be loaded: the kernel killed 3 process\(es\) meanwhile because memory ran out\n"
    with server, pytest.raises(ServerError, match=said) as caught:
        server.start(deadline=240)
    assert starts.read_text() == "x" * shortage.MOST_KILLS
    assert "lower stages.package.max_tokens_in_paged_kv_cache" in caught.value.hint
    assert memory(server) == []


def test_a_model_that_never_starts_meets_the_deadline(tmp_path):
    server = make(tmp_path, code="import time\ntime.sleep(600)")
    with server, pytest.raises(ServerError, match=r"did not load its models in 3 s"):
        server.start(deadline=3)
    assert memory(server) == []


# Stops, for two seconds, the thread of a stub that says that it is healthy: the one that sleeps while it is started.
STARVE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    with open(f"/proc/{sys.argv[1]}/task/{thread}/syscall") as file:
        if file.read().split()[0] in ("35", "230"):  # nanosleep, clock_nanosleep
            seize, interrupt = 0x4206, 0x4207
            stopped = [libc.ptrace(request, int(thread), None, None) for request in (seize, interrupt)] == [0, 0]
            time.sleep(2.5 if stopped else 0)
            sys.exit(0 if stopped else 9)
sys.exit("no thread sleeps")
"""
STARVED = """
    def initialize(self, args):
        import os, pathlib, subprocess
        times = pathlib.Path({times!r})
        count = len(times.read_text()) if times.exists() else 0
        times.write_text("x" * (count + 1))
        if count in {when!r}:
            subprocess.run([{python!r}, "-c", {starve!r}, str(os.getpid())], check=True)
"""


def test_a_process_that_triton_gives_up_is_started_again(tmp_path):
    """As on a busy machine, when a model's process gets no processor for a second while it is loaded: Triton then
    waits for its end, and it for Triton. So at the start, and when the model is loaded again."""
    times = tmp_path / "times"
    starved = STARVED.format(times=str(times), when=[0, 1, 3], python=sys.executable, starve=STARVE)
    with make(tmp_path, code=PROBE + starved) as server:
        try:
            server.start(deadline=120)
        except ServerError as error:
            if "exit status 9" in error.message:
                pytest.skip("a process may not be traced here")
            raise
        assert ask(server)["prefix"] == sys.prefix
        assert times.read_text() == "xxx"
        server.control.unload("probe", deadline=30)
        server.load("probe", deadline=60)
        assert ask(server)["prefix"] == sys.prefix
        assert times.read_text() == "xxxxx"
    assert memory(server) == []


def test_a_process_is_ended_when_it_is_waited_for_too_long():
    """Not one that is not waited for, and not before its time."""
    parent = "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); {}"
    for what, awaited in (("print(child.wait())", True), ("sys.stdin.read()", False)):
        command = [sys.executable, "-c", parent.format(what)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            child = int(process.stdout.readline())
            end = time.monotonic() + 30
            while awaited and child not in find_awaited(process.pid):
                assert time.monotonic() < end
            overdue = Overdue(process.pid)
            for now in (100.0, 104.9):
                overdue.look(now)
            assert is_alive(child)
            overdue.look(106.0)
            if awaited:
                assert process.communicate(timeout=30)[0] == f"{-signal.SIGKILL}\n"
            else:
                assert is_alive(child)
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("name", ["grpc", "metrics"])
def test_a_taken_port_is_named(tmp_path, name):
    probe = write_probe(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = Addresses(**{name: port})
        server = TritonServer(find_installation(), **probe, log=tmp_path / "log", addresses=taken, grace=1)
        with server, pytest.raises(ServerError, match=f"{port} cannot be listened on: Address") as caught:
            server.start(deadline=120)
    assert caught.value.hint == f"choose another --{name}-port or --host"
    assert not (tmp_path / "log").exists()


def test_one_port_for_two_things_is_refused():
    addresses = Addresses().resolve()
    addresses.check()
    with pytest.raises(ServerError, match="--metrics-port"):
        dataclasses.replace(addresses, metrics=addresses.grpc).check()


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    server = make(tmp_path)
    (tmp_path / "log").mkdir()
    with server, pytest.raises(ServerError, match=r"log: the server's log cannot be written: Is a directory\n.*--log"):
        server.start(deadline=120)


def test_a_server_that_was_never_started_removes_nothing(tmp_path, monkeypatch):
    """Its folder was the current one until it had one of its own, and ending it emptied that."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "precious").touch()
    monkeypatch.chdir(tmp_path / "here")
    server = make(tmp_path)
    assert server.stop() is None
    with server:
        pass
    assert os.listdir() == ["precious"]


def test_a_dead_stub_is_seen_and_its_model_loaded_again(tmp_path):
    with make(tmp_path) as server:
        server.start(deadline=120)
        (stub,) = server.stubs
        os.kill(stub, signal.SIGKILL)
        end = time.monotonic() + 10
        while server.stubs and time.monotonic() < end:
            time.sleep(0.05)
        assert server.stubs == {}
        assert server.running
        server.control.unload("probe", deadline=60)
        server.control.load("probe", deadline=60)
        assert ask(server)["prefix"] == sys.prefix


BUSY = PROBE.replace("        import pipeline\n", "        import pipeline, time\n        time.sleep(600)\n")


def test_an_end_that_is_interrupted_is_made_at_once(tmp_path):
    """As Ctrl-C does it the second time: nothing may go on in the background."""
    server = make(tmp_path, code=BUSY)
    server.start(deadline=120)
    processes = [server.pid, *server.stubs]

    def ask_in_vain():
        with contextlib.suppress(OSError):
            ask(server)

    asking = threading.Thread(target=ask_in_vain)
    asking.start()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            server.stop(grace=120)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 60
    asking.join()
    assert not any(is_alive(pid) for pid in processes)
    assert memory(server) == []


class InterruptedAtStart(subprocess.Popen):
    """A keeper that says which process it started just when who waits for that is interrupted."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.said, self.stdout = self.stdout, self
        self.read, self.close = self.said.read, self.said.close

    def readline(self):
        select.select([self.said], [], [], 30)
        raise KeyboardInterrupt


def test_a_start_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    job = {"command": ["sleep", "600"], "log": str(tmp_path / "log"), "start_in": str(tmp_path), "grace": 1}
    job |= {"shared_memory_prefix": f"{PREFIX}_{os.getpid()}_kept_", "folder": str(tmp_path / "folder")}
    keepers = []
    monkeypatch.setattr(
        kept.subprocess, "Popen", lambda *a, **b: keepers.append(InterruptedAtStart(*a, **b)) or keepers[0]
    )
    with pytest.raises(KeyboardInterrupt):
        kept.Kept(job, dict(os.environ))
    assert keepers[0].returncode == 0
    assert not (tmp_path / "folder").exists()


def test_a_full_disk_does_not_keep_a_server_from_ending(tmp_path, monkeypatch):
    server = make(tmp_path)
    server.start(deadline=120)
    processes = [server.pid, *server.stubs]

    def touch(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "touch", touch)
    assert server.stop() == 0
    assert not any(map(is_alive, processes))


def test_nothing_is_left_when_the_owner_is_killed(tmp_path):
    write_probe(tmp_path)
    code = f"""
        import time
        from pathlib import Path
        from pipeline.triton.installation import find_installation
        from pipeline.triton.server import TritonServer
        folder = Path({str(tmp_path)!r})
        options = dict(repository=folder / "models", backends=[], log=folder / "log", grace=1)
        server = TritonServer(find_installation(), **options)
        server.start(deadline=120)
        print(server.pid, *server.stubs, server.prefix, flush=True)
        time.sleep(600)
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    with owner.stdout as output:
        *pids, prefix = output.readline().split()
    assert len(pids) == 2
    assert all(is_alive(int(pid)) for pid in pids)
    assert list(temporary.iterdir())
    owner.kill()
    owner.wait()
    while (
        any(is_alive(int(pid)) for pid in pids)
        or list(Path("/dev/shm").glob(f"{prefix}*"))
        or list(temporary.iterdir())
    ):  # for ever would be the failure
        time.sleep(0.1)


def test_a_server_removes_what_the_dead_left_and_nothing_else(tmp_path):
    """Not what a live server of another container has, whose process ids mean nothing here, nor what only looks so."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    prefixes = [f"trtseek_{dead.pid}_{token}_" for token in ("0123abcd", "4567abcd", "cdefabcd", "89ababcd")]
    stale, live, odd, unknown = ([Path(f"/dev/shm/{prefix}{name}") for name in (OWNER, "x")] for prefix in prefixes)
    folder = Path(f"/dev/shm/{prefixes[0]}folder")
    others = [Path("/dev/shm/trtseek-0123abcd"), Path(f"/dev/shm/trtseek_{dead.pid}_{OWNER}"), unknown[1]]
    folders = [tmp_path / f"{FOLDER}dead", tmp_path / f"{FOLDER}live", tmp_path / "precious"]
    for path in folders:
        path.mkdir()
        (path / "file").touch()
    claims = [claim(prefix, str(path)) for prefix, path in zip(prefixes, folders, strict=False)]
    try:
        for path in (stale[1], live[1], odd[1], *others):
            path.touch()
        folder.mkdir()
        os.close(claims.pop(0))
        os.close(claims.pop())
        remove_remains()
        assert not any(path.exists() for path in (*stale, *odd))
        assert all(path.exists() for path in (*live, *others, folder))
        assert sorted(tmp_path.iterdir()) == sorted(folders[1:])
        os.close(claims.pop())
        remove_remains()
        assert not any(path.exists() for path in live)
        assert [path.name for path in tmp_path.rglob("*")] == ["precious", "file"]
    finally:
        folder.rmdir()
        for path in (*stale, *live, *odd, *others):
            path.unlink(missing_ok=True)


def test_a_folder_that_another_user_names_is_left_alone(tmp_path, monkeypatch):
    """Whoever can write to /dev/shm could have anything of somebody else's removed."""
    prefix = f"{PREFIX}_{os.getpid()}_0123abcd_"
    (folder := tmp_path / f"{FOLDER}mine").mkdir()
    os.close(claim(prefix, str(folder)))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: 12345)
            remove_remains()
        assert folder.exists()
        remove_remains()
        assert not folder.exists()
    finally:
        Path(f"/dev/shm/{prefix}{OWNER}").unlink(missing_ok=True)


def test_what_is_a_servers_stays_as_long_as_its_process_lives(tmp_path):
    """Though its keeper was killed, and so could not end it."""
    with make(tmp_path) as server:
        server.start(deadline=120)
        remove_remains()
        assert len(memory(server)) > 1
        folder = server._folder
        server._kept.keeper.kill()
        server._kept.keeper.wait()
        remove_remains()
        assert len(memory(server)) > 1
        assert folder.exists()
        os.killpg(server.pid, signal.SIGKILL)
        while memory(server):  # until the last thread of the last process is gone; for ever would be the failure
            remove_remains()
            time.sleep(0.02)
        assert not folder.exists()


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_what_tritons_python_backend_makes_is_in_the_servers_own_folder(tmp_path, how):
    """A folder in /tmp for each server, which stayed there when the server was killed."""
    with make(tmp_path) as server:
        server.start(deadline=120)
        folder = server._folder
        assert len(list(folder.glob("python_env_*"))) == 1
        if how == "killed":
            os.kill(server.pid, signal.SIGKILL)
    assert not folder.exists()
