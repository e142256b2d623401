"""Networks that name their weights without holding them: the same network, and what a refit must bring to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CheckpointError
from pipeline.network.network import Network, build_stripped_network
from pipeline.network.placeholders import Placeholder, RecordingSource, Visitor
from pipeline.network.readback import read_network
from pipeline.sharding import Parallel, Rank
from tests import fixtures
from tests.network import formats, models

INT4 = {"pattern": r"mlp.*_proj\.weight|o_proj", "group": 64}


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    """Latent attention, a dense and a routed layer, experts that differ in their prescale."""
    path = tmp_path_factory.mktemp("v2")
    return models.load_int4(fixtures.deepseek_v2, path, **INT4, prescale="each", dtype="float16", num_hidden_layers=2)


MODELS: dict[str, Callable[[Path], models.Model]] = {
    "v2-int4-shared-prescale": lambda path: models.load_int4(
        fixtures.deepseek_v2, path, **INT4, prescale="all", dtype="bfloat16", num_hidden_layers=2
    ),
    "v2-fp16": lambda path: models.load(fixtures.deepseek_v2(path, dtype="float16", num_hidden_layers=2)),
    "v3-8-bit": lambda path: formats.load(
        fixtures.deepseek_v3,
        path,
        {r"o_proj|experts.*gate_proj": "fp8", r"experts.*up_proj": "int8_sq", r"mlp.*_proj": "int8"},
        num_hidden_layers=2,
    ),
    "llama-tied-fp32": lambda path: models.load(
        fixtures.llama(path, dtype="float32", num_hidden_layers=2, tie_word_embeddings=True)
    ),
}


def _strip(
    model: models.Model,
    visit: Visitor | None = None,
    source: object = None,
    rank: Rank = Rank(),
) -> Network:
    import tensorrt_rtx as trt

    definition = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)
    return build_stripped_network(
        trt,
        definition,
        model.spec(rank=rank),
        model.architecture,
        source or model.source,  # type: ignore[arg-type]
        visit=visit,
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_digest_is_that_of_the_network_with_its_weights(name: str, tmp_path: Path) -> None:
    model = MODELS[name](tmp_path / "hf")
    full, stripped = model.program(), read_network(_strip(model))
    assert stripped.dump() == full.dump() and stripped.digest() == full.digest()
    assert stripped.absent and not stripped.absent.keys() & stripped.constants.keys()


@pytest.mark.parametrize("index", range(2))
def test_a_rank_has_one_digest_too(index: int, tmp_path: Path) -> None:
    """Its constants are slices, some of them copies that nothing but the network holds."""
    made = formats.load(
        fixtures.deepseek_v3,
        tmp_path / "hf",
        {r"mlp.*_proj|o_proj": "int4"},
        num_hidden_layers=2,
        moe_intermediate_size=128,
    )
    rank = Rank(Parallel(tensor=2, expert=2), index)
    assert read_network(_strip(made, rank=rank)).digest() == made.program(rank=rank).digest()


def test_every_constant_is_shown_once_as_the_full_network_holds_it(v2: models.Model) -> None:
    program, seen = v2.program(), {}

    def visit(placeholder: Placeholder, raw: RawTensor) -> None:
        assert placeholder.name not in seen
        assert placeholder.nbytes == raw.data.nbytes and raw.data.flags.c_contiguous
        seen[placeholder.name] = raw.data.copy()

    network = _strip(v2, visit)
    assert seen.keys() == network.placeholders.keys()
    for name, data in seen.items():
        np.testing.assert_array_equal(data, program.constants[name].data, err_msg=name)
        spec = program.constant_specs[name]
        assert (network.placeholders[name].dtype, network.placeholders[name].shape) == (spec.dtype, spec.shape)
    # What is left is of the architecture: RoPE's tables, and small numbers.
    assert set(program.constants) - set(seen) == set(network.constants)
    assert {"rope.cos", "rope.sin"} <= network.constants.keys()
    assert all(raw.data.nbytes <= 16 for name, raw in network.constants.items() if not name.startswith("rope."))


def test_each_placeholder_names_the_tensors_that_make_it(v2: models.Model) -> None:
    found = _strip(v2).placeholders
    layer = "transformer.layers.1."
    stored = found["layers.1.attention.kv_a_layernorm.weight"]
    assert stored.sources == (f"{layer}attention.kv_a_layernorm.weight",) and stored.stored
    turned = found["layers.1.attention.dense.weight"]
    assert turned.sources == (f"{layer}attention.dense.weight",) and not turned.stored
    assert turned.dtype == "int4"
    for half in ("key", "value"):
        split = found[f"layers.1.attention.kv_b_proj.{half}_weight"]
        assert split.sources == (f"{layer}attention.kv_b_proj.weight",) and not split.stored
    for kind in ("weight", "weights_scaling_factor", "prequant_scaling_factor"):
        stack = found[f"layers.1.mlp.experts.gate.{kind}"]
        assert stack.sources == tuple(f"{layer}mlp.experts.{e}.gate.{kind}" for e in range(stack.shape[0]))
    # Nothing of the checkpoint is left out.
    assert {name for each in found.values() for name in each.sources} == v2.source.raw.keys()


@dataclass
class Watched(models.MemorySource):
    """Counts the bytes that are read and not yet let go of."""

    held: dict[str, int] = field(default_factory=dict)
    most: int = 0

    def read(self, name: str) -> RawTensor:
        raw = super().read(name)
        self.held[name] = raw.data.nbytes
        self.most = max(self.most, sum(self.held.values()))
        return raw

    def release(self, name: str) -> None:
        self.held.pop(name, None)


def test_a_stack_is_read_an_expert_at_a_time(tmp_path: Path) -> None:
    """Described ahead of reading, a stack costs what one expert does, not what a layer does."""
    models_of = [
        models.load(fixtures.deepseek_v2(tmp_path / str(count), dtype="float16", **_experts(count)))
        for count in (8, 32)
    ]
    most = []
    for model in models_of:
        source = Watched(dict(model.source.raw))
        stacks = [name for name in source.raw if ".experts." in name]
        _strip(model, source=_OnlyStacks(source, stacks))
        most.append(source.most)
    assert most[0] == most[1]


def _experts(count: int) -> dict[str, int]:
    return {"num_hidden_layers": 2, "n_routed_experts": count}


class _OnlyStacks:
    """Passes reads of some tensors through a counting source, all others beside it."""

    def __init__(self, source: Watched, counted: list[str]) -> None:
        self.source, self.counted = source, set(counted)
        self.tensors = source.tensors

    def read(self, name: str) -> RawTensor:
        return self.source.read(name) if name in self.counted else self.source.raw[name]

    def release(self, name: str) -> None:
        self.source.release(name)


def test_values_are_still_checked(v2: models.Model) -> None:
    name = "transformer.layers.0.attention.dense.weights_scaling_factor"
    scales = v2.source.raw[name].to_torch() * (1 + 2.0**-12)
    source = models.MemorySource({**v2.source.raw, name: RawTensor.from_torch(scales)})
    with pytest.raises(CheckpointError, match=r"scales that float16 cannot represent"):
        _strip(v2, source=source)


def test_bytes_that_were_copied_have_no_source(v2: models.Model) -> None:
    source = RecordingSource(v2.source)
    raw = source.read("transformer.ln_f.weight")
    assert source.name_of(raw) == "transformer.ln_f.weight"
    with pytest.raises(ValueError, match="not read from the checkpoint"):
        source.name_of(RawTensor(raw.dtype, raw.shape, raw.data.copy()))
