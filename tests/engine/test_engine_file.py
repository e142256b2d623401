from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import tensorrt_rtx

from pipeline.engine.engine_file import inspect_engine
from pipeline.engine.workspace import GEMM_SCRATCH
from pipeline.errors import BuildError
from pipeline.network.inputs import network_inputs, network_outputs
from tests.engine.conftest import Built


def logged(built: Built, what: str) -> list[int]:
    """What TensorRT itself said while building."""
    return [int(n) for n in re.findall(rf"{what}: (\d+) bytes", built.log.read_text())]


@pytest.mark.parametrize("which", ["llama_engine", "v2_engine"])
def test_agrees_with_what_tensorrt_logged(which: str, request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(which)
    engine = inspect_engine(built.path)
    assert [engine.weights_bytes] == logged(built, "Total Weights Memory")
    assert [profile.workspace_bytes for profile in engine.profiles] == logged(built, "Total Activation Memory")
    assert engine.version == tensorrt_rtx.__version__
    assert engine.nbytes == built.path.stat().st_size
    assert engine.targets == (80,)


@pytest.mark.parametrize("which", ["llama_engine", "v2_engine"])
def test_inputs_and_outputs_are_the_networks(which: str, request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(which)
    engine = inspect_engine(built.path)
    wanted = network_inputs(built.architecture, built.spec)
    assert [(t.name, t.dtype, t.shape) for t in engine.inputs] == [(p.name, p.dtype, p.shape) for p in wanted]
    wanted = network_outputs(built.architecture, built.spec)
    assert {(t.name, t.dtype, t.shape) for t in engine.outputs} == {(p.name, p.dtype, p.shape) for p in wanted}


def test_kernels_show_what_was_fused(llama_engine: Built) -> None:
    context, *generation = inspect_engine(llama_engine.path).profiles
    assert context.graph.kernels["_gemm_mha_v2"] == 2  # fused attention, one per layer
    for profile in generation:
        assert profile.graph.kernels["_gemv_mha_v1"] == 2
        assert profile.shapes["pad_index"] == (-1, 1)
        # qkv, dense, gate and up in one, down: every INT4 linear dequantizes inside its GEMM
        assert profile.graph.fusions["__myl_ReplCastMulCastFc"] == 8
    assert context.shapes["pad_index"] == (-1, -1)


def test_no_region_of_latent_attention_grows_with_heads_and_length(v2_engine: Built) -> None:
    """Had TensorRT copied the latent for every head, a region would hold B x heads x K x latent."""
    engine = inspect_engine(v2_engine.path)
    latent = v2_engine.architecture.latent
    assert latent is not None
    for rectangle, profile in zip(v2_engine.limits.generation, engine.profiles[1:], strict=True):
        pages = 2 * rectangle.batch * rectangle.length * latent.latent_dim
        largest = profile.graph.regions[0]
        assert largest.nbytes == max(pages, GEMM_SCRATCH) < v2_engine.architecture.num_heads * pages


def test_regions_name_the_tensors_that_share_them(llama_engine: Built) -> None:
    regions = inspect_engine(llama_engine.path).profiles[1].graph.regions
    assert [region.nbytes for region in regions] == sorted((region.nbytes for region in regions), reverse=True)
    gathered = [t for t in regions[0].tensors if t.dims[-3:] == ("2", "64", "64") or t.dims[-1:] == ("64",)]
    assert gathered and all(t.dtype == "half" for t in gathered)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="No such file"):
        inspect_engine(tmp_path / "model.engine")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"vtrt" + bytes(20), "has 24 bytes"),
        (b"ptrt" + bytes(100), "not a TensorRT-RTX engine"),
        (bytes(range(256)) * 10, "not a TensorRT-RTX engine"),
        (b"vtrt" + bytes(1000), "container version 0"),
        (b"vtrt\0\0\0\0" + struct.pack("<QQ", 2, 100) + bytes(1000), "no program section"),
    ],
)
def test_garbage(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(content)
    with pytest.raises(BuildError, match=message):
        inspect_engine(path)


def test_truncated_anywhere(llama_engine: Built, tmp_path: Path) -> None:
    whole = llama_engine.path.read_bytes()
    path = tmp_path / "model.engine"
    for share in range(20):
        path.write_bytes(whole[: 70 + len(whole) * share // 20])
        with pytest.raises(BuildError, match="truncated"):
            inspect_engine(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(BuildError, match="truncated"):
        inspect_engine(path)


def test_damaged_program(llama_engine: Built, tmp_path: Path) -> None:
    """A region's size changed: the workspace stated elsewhere in the file no longer adds up."""
    path = tmp_path / "model.engine"
    path.write_bytes(
        re.sub(rb"size=(\d)(\d+) alignment=128", rb"size=9\2 alignment=128", llama_engine.path.read_bytes())
    )
    with pytest.raises(BuildError, match="states workspaces"):
        inspect_engine(path)


def test_wiped_program(llama_engine: Built, tmp_path: Path) -> None:
    data = bytearray(llama_engine.path.read_bytes())
    offset, nbytes = struct.unpack_from("<QQ", data, 72)
    data[offset : offset + nbytes] = bytes(nbytes)
    path = tmp_path / "model.engine"
    path.write_bytes(data)
    with pytest.raises(BuildError, match="no inputs and outputs"):
        inspect_engine(path)
