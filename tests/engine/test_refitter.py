"""What is offered to TensorRT's refitter: every constant once, in the type and bytes that the built network has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.engine.refit import make_constants
from pipeline.engine.refit_list import RefitList
from pipeline.engine.refitter import Spool, WeightBringer
from pipeline.errors import BuildError, CheckpointError
from pipeline.network.network import build_network, build_stripped_network
from pipeline.network.readback import read_network
from pipeline.network.spec import NetworkSpec
from pipeline.progress import SILENT
from tests.engine.checkpoints import TINY_V2, write_engine_checkpoint
from tests.engine.conftest import V2_INT4
from tests.engine.fake_refitter import FakeRefitter, TrtWithWeights

SPEC = NetworkSpec(dtype="float16", max_seq_len=128, block_size=32)
# As TensorRT merges gate and up projections, with their scales, into one GEMM.
TOGETHER = [
    {f"layers.0.mlp.{name}.{kind}" for name in ("fc", "gate") for kind in ("weight", "weights_scaling_factor")},
    {f"layers.1.mlp.experts.{name}.{kind}" for name in ("fc", "gate") for kind in ("weight", "weights_scaling_factor")},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    path = tmp_path_factory.mktemp("refit") / "checkpoint"
    return CheckpointFolder.open(write_engine_checkpoint(path, TINY_V2, int4=V2_INT4, group=64))


def _definition() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)


@pytest.fixture(scope="module")
def wanted(source: CheckpointFolder) -> RefitList:
    network = build_stripped_network(trt, _definition(), SPEC, source.architecture, source)
    return RefitList(network_digest=read_network(network).digest(), constants=tuple(network.placeholders.values()))


def _bring(refitter: FakeRefitter, wanted: RefitList, source: CheckpointFolder, folder: Path) -> WeightBringer:
    with Spool(folder) as spool:
        bringer = WeightBringer(TrtWithWeights(trt), refitter, wanted, spool)
        make_constants(trt, SPEC, source.architecture, source, bringer, SILENT)
        bringer.finish()
    return bringer


@pytest.mark.parametrize(
    ("options", "most", "fewest_refits"),
    [({}, 1, 30), ({"together": TOGETHER}, 4, 20), ({"at_once": True}, None, 1)],
    ids=["one by one", "combined weights", "all at once"],
)
def test_every_constant_arrives_once_as_the_built_network_holds_it(
    options: dict[str, Any],
    most: int | None,
    fewest_refits: int,
    wanted: RefitList,
    source: CheckpointFolder,
    tmp_path: Path,
) -> None:
    refitter = FakeRefitter(trt, wanted.constants, **options)
    bringer = _bring(refitter, wanted, source, tmp_path)
    built = build_network(trt, _definition(), SPEC, source.architecture, source)
    names = [constant.name for constant in wanted.constants]
    assert refitter.offered == names and refitter.set_now == {}
    for name in names:
        assert refitter.taken[name] == built.constants[name].data.tobytes(), name
    assert refitter.most_set == (most or len(names))
    assert bringer.refits >= fewest_refits
    # Nothing is left of what waited on the disk.
    assert list(tmp_path.iterdir()) == []


def test_a_constant_of_another_checkpoint_is_named_and_not_given(
    wanted: RefitList, source: CheckpointFolder, tmp_path: Path
) -> None:
    other = write_engine_checkpoint(tmp_path / "other", TINY_V2, int4=V2_INT4, group=64, seed=1)
    refitter = FakeRefitter(trt, wanted.constants)
    match = r"constant vocab_embedding\.weight, made of transformer\.vocab"
    with pytest.raises(CheckpointError, match=match) as caught:
        _bring(refitter, wanted, CheckpointFolder.open(other), tmp_path)
    assert "engine.json" in caught.value.hint and refitter.offered == []


def test_engine_and_list_of_two_builds(wanted: RefitList, tmp_path: Path) -> None:
    refitter = FakeRefitter(trt, wanted.constants[1:])
    match = r"differ in 1 weights, vocab_embedding\.weight among them"
    with Spool(tmp_path) as spool, pytest.raises(BuildError, match=match):
        WeightBringer(trt, refitter, wanted, spool)


def test_a_type_that_the_engine_does_not_want(wanted: RefitList, source: CheckpointFolder, tmp_path: Path) -> None:
    wide = replace(wanted.constants[0], dtype="float32")
    refitter = FakeRefitter(trt, (wide, *wanted.constants[1:]))
    with pytest.raises(BuildError, match=r"wants 65536 values of DataType\.FLOAT for vocab_embedding\.weight"):
        _bring(refitter, wanted, source, tmp_path)


def test_a_constant_that_is_never_made(wanted: RefitList, source: CheckpointFolder, tmp_path: Path) -> None:
    more = replace(wanted, constants=(*wanted.constants, replace(wanted.constants[0], name="layers.9.extra")))
    refitter = FakeRefitter(trt, more.constants)
    with pytest.raises(BuildError, match=r"1 weights of the engine were not made, layers\.9\.extra among them"):
        _bring(refitter, more, source, tmp_path)


def test_a_refused_refit(wanted: RefitList, source: CheckpointFolder, tmp_path: Path) -> None:
    refitter = FakeRefitter(trt, wanted.constants)
    refitter.refit_cuda_engine = lambda: False  # type: ignore[method-assign]
    with pytest.raises(BuildError, match="TensorRT refused the refit"):
        _bring(refitter, wanted, source, tmp_path)


def test_spooled_bytes_stay_where_they_are(tmp_path: Path) -> None:
    arrays = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in (1, 5000, 4096, 77)]
    with Spool(tmp_path) as spool:
        kept = [spool.keep(array) for array in arrays]
        for array, copy in zip(arrays, kept, strict=True):
            np.testing.assert_array_equal(array, copy)
            assert copy.ctypes.data != array.ctypes.data
        del kept, copy
        spool.clear()
        np.testing.assert_array_equal(spool.keep(arrays[1]), arrays[1])
