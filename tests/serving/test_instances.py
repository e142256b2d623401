"""A model of two processes, of which one dies: what the other has in hand is answered in full."""

import os
import shutil
import signal
import sys

import pytest

from pipeline.triton.model_config import print_config
from pipeline.triton.package import read_configs
from tests.serving.asking import LENGTH, Stream, make_inputs, make_request
from tests.serving.test_serve import TRIES, Serving, wait_for

MODEL, STREAMS = "tensorrt_llm_bls", 6


@pytest.fixture
def serving(served, tmp_path):
    package = tmp_path / "package"
    shutil.copytree(served.repository.path.parent, package, symlinks=True)
    config = read_configs(package / "model_repository")[MODEL]
    config.instance_group[0].count = 2
    (package / "model_repository" / MODEL / "config.pbtxt").write_text(print_config(config))
    serving = Serving(package, tmp_path)
    yield serving
    serving.process.send_signal(signal.SIGTERM)
    print(serving.end(), file=sys.stderr)


def list_stubs(serving):
    return [pid for pid, command in serving.processes().items() if f"/{MODEL}/1/model.py" in command]


def kill_one_of_two(serving):
    """Streams of both, and one that had an answer of them and now has another model's."""
    before, aborts = set(list_stubs(serving)), serving.count_aborts()
    stub = max(before)  # one that is watched: those of before live on
    other = Stream(serving.grpc, MODEL)
    assert other.ended.wait(60)
    other.ended.clear()
    streams = [Stream(serving.grpc, MODEL) for _ in range(STREAMS)]
    other.client.async_stream_infer(
        "tensorrt_llm", make_inputs(make_request("tensorrt_llm")), enable_empty_final_response=True
    )
    os.kill(stub, signal.SIGKILL)
    assert all(wait_for(lambda each=each: each.errors or each.ended.is_set()) for each in (other, *streams))
    assert wait_for(
        lambda: len(set(list_stubs(serving)) - before) == 2 and serving.request("/v2/health/ready")[0] == 200, 120
    )
    for each in (other, *streams):
        each.client.stop_stream()
        each.client.close()
    return serving.count_aborts() > aborts, other, streams


def test_one_of_two_that_dies_takes_none_of_the_others_requests(serving):
    """Under load a stream may have ended before, so that nothing was in flight: then once more. Also where Triton ended
    with the process: it is started again, and nobody waits for an answer."""
    for _ in range(TRIES):
        aborted, other, streams = kill_one_of_two(serving)
        whole, lost = [], []
        if aborted:
            continue
        assert (other.errors, other.seen) == ([], 2 * LENGTH)
        whole = [stream for stream in streams if not stream.errors]
        lost = [stream for stream in streams if stream.errors]
        assert all(stream.seen == LENGTH for stream in whole)
        assert all(stream.errors[0].message() == f"{MODEL} failed, and is loaded again: ask again" for stream in lost)
        if whole and lost:
            break
    assert whole and lost
    assert serving.query("hello", "--max-tokens=2").returncode == 0
