"""The estimate of what serving a package takes of memory, against a real server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.stages.network import network_spec
from pipeline.triton.client import ask_all
from pipeline.triton.footprint import estimate_memory
from pipeline.triton.installation import find_installation
from pipeline.triton.package import find_package
from pipeline.triton.query import Query
from pipeline.triton.server import TritonServer
from pipeline.triton.serving_memory import Part, estimate_planned
from tests.serving.memory import measure_memory
from tests.serving.support import Served, make_config, serve_package

# How far the estimate may be off: of all, and of what is of one kind, or so many bytes of the latter. Another server on
# the machine takes its share of tritonserver's code.
TOLERANCE, PART_TOLERANCE, PART_BYTES = 0.25, 0.4, 32 << 20
ONE = {"keeper": 1, "tritonserver": 1, "preprocessing": 1, "postprocessing": 1, "ensemble": 1, "tensorrt_llm_bls": 1}


def estimate(served: Served) -> dict[str, Part]:
    """Without what `trtseek serve` takes itself: here the server is started by the test."""
    parts = estimate_memory(find_package(served.repository.path.parent))
    return {part.name: part for part in parts if part.name != "trtseek serve"}


def compare(estimated: dict[str, Part], server: TritonServer) -> None:
    queries = [Query(text=f"hello {number}", options={"max_tokens": 40}) for number in range(16)]
    answers = list(ask_all(queries, url=f"127.0.0.1:{server.addresses.grpc}", concurrency=8))
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    assert server._kept is not None
    measured = measure_memory(server._kept.keeper.pid)
    assert {name: len(each) for name, each in measured.items()} == {
        name: part.processes for name, part in estimated.items()
    }
    for name, part in estimated.items():
        assert part.nbytes == pytest.approx(sum(measured[name]), rel=PART_TOLERANCE, abs=PART_BYTES), (
            name,
            measured[name],
        )
    taken = sum(sum(each) for each in measured.values())
    assert sum(part.nbytes for part in estimated.values()) == pytest.approx(taken, rel=TOLERANCE)


def test_one_process_of_each_model(served: Served, server: TritonServer) -> None:
    estimated = estimate(served)
    assert {name: part.processes for name, part in estimated.items()} == {**ONE, "tensorrt_llm": 1}
    compare(estimated, server)


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}])
def test_planned_is_what_is_estimated_of_the_package(
    tmp_path: Path, llama_path: Path, parallel: dict[str, int]
) -> None:
    """By the checkpoint's bytes, in which its header is of no weight."""
    config = make_config(parallel=parallel, preprocessing_instances=2)
    made = serve_package(tmp_path / "made", llama_path, config)
    spec = network_spec(config, "float16")
    sizes = config.target.parallel.sizes
    specs = [replace(spec, rank=rank) for rank in sizes.ranks] if sizes.world > 1 else [spec]
    nbytes = sum(file.stat().st_size for file in made.checkpoint.files if file.suffix == ".safetensors")
    planned = estimate_planned(config, made.checkpoint.architecture, specs, checkpoint_bytes=nbytes)
    estimated = estimate_memory(find_package(made.repository.path.parent))
    assert sorted(planned, key=lambda part: part.name) == sorted(estimated, key=lambda part: part.name)


@pytest.mark.thorough
def test_what_the_options_start_and_hold_is_counted(served: Served, tmp_path: Path, llama_path: Path) -> None:
    """More processes of a model, another rank, and a larger KV cache."""
    few = {part.name: part for part in estimate(served).values()}
    options = {"preprocessing_instances": 3, "postprocessing_instances": 2, "interpreter_mode": "fast"}
    many = serve_package(
        tmp_path / "many", llama_path, make_config("many", {"tensor": 2}, max_batch_size=256, **options)
    )
    estimated = estimate(many)
    assert {name: part.processes for name, part in estimated.items()} == {
        **ONE,
        "preprocessing": 3,
        "postprocessing": 2,
        "tensorrt_llm": 2,
    }
    for name, count in (("preprocessing", 3), ("postprocessing", 2), ("ensemble", 1)):
        assert estimated[name].nbytes == count * few[name].nbytes
    architecture = many.checkpoint.architecture
    tokens, width = 256 * 256, architecture.num_kv_heads * architecture.head_dim
    pools = tokens * 2 * architecture.num_layers * width * 4
    assert pools > 64 << 20
    assert estimated["tensorrt_llm"].nbytes == pytest.approx(2 * few["tensorrt_llm"].nbytes + pools, rel=0.1)
    repository = many.repository
    server = TritonServer(
        find_installation(),
        repository=repository.path,
        backends=[repository.backends],
        log=tmp_path / "server.log",
        grace=5,
    )
    with server:
        server.start(deadline=240)
        compare(estimated, server)
