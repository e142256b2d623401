"""What a network declares, owns and digests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CompatibilityError
from pipeline.network import inputs
from pipeline.network.inputs import network_inputs, network_outputs
from pipeline.network.spec import NetworkSpec
from pipeline.sharding import Parallel, Rank
from tests import fixtures
from tests.network import models

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    return models.load(fixtures.llama(tmp_path_factory.mktemp("llama"), dtype="float16"))


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    path = tmp_path_factory.mktemp("v2")
    return models.load_int4(
        fixtures.deepseek_v2, path, pattern=r"mlp.*_proj\.weight|o_proj", group=64, dtype="bfloat16", prescale="each"
    )


SLICES = [(a, b) for a in range(3) for b in range(a + 1, 4)]


@pytest.mark.parametrize("layers", SLICES)
@pytest.mark.parametrize("which", ["llama", "v2"])
def test_inputs_and_outputs_are_the_declared_ones(
    which: str, layers: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    model: models.Model = request.getfixturevalue(which)
    spec = model.spec(layers=layers)
    program = models.read_program(spec, model.architecture, model.source)
    for found, ports in (
        (program.inputs, network_inputs(model.architecture, spec)),
        (program.outputs, network_outputs(model.architecture, spec)),
    ):
        expected = {port.name: (port.dtype, port.shape) for port in ports}
        assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in found} == expected
    names = {tensor.name for tensor in program.inputs}
    assert ("input_ids" in names, "hidden_states" in names) == (layers[0] == 0, layers[0] > 0)
    assert ("logit_rows" in names) == (layers[1] == 3)
    assert {f"layers.{layer}.output" for layer in range(*layers)} <= program.tensors.keys()


def test_every_input_is_used(llama: models.Model, v2: models.Model) -> None:
    for model in (llama, v2):
        for layers in SLICES:
            program = model.program(layers=layers)
            used = {name for node in program.nodes for name in node.inputs}
            assert {tensor.name for tensor in program.inputs} <= used


@pytest.mark.parametrize("layers", [(0, 0), (2, 1), (-1, 2), (1, 4)])
def test_a_slice_outside_the_model_is_refused(layers: tuple[int, int], llama: models.Model) -> None:
    with pytest.raises(CompatibilityError, match="no slice of a model of 3 layers"):
        llama.program(layers=layers)


def test_16_bit_weights_are_not_copied(llama: models.Model) -> None:
    source = {name.removeprefix("transformer."): raw for name, raw in llama.source.raw.items()}
    program = llama.program()
    for name, raw in source.items():
        assert program.constants[name].data is raw.data, name


def test_tensorrt_points_to_the_kept_memory(llama: models.Model) -> None:
    import tensorrt_rtx as trt

    from pipeline.network.network import build_network

    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = build_network(trt, builder.create_network(0), llama.spec(), llama.architecture, llama.source)
    addresses = {}
    for index in range(network.network.num_layers):
        layer = network.network.get_layer(index)
        if layer.type == trt.LayerType.CONSTANT:
            layer.__class__ = trt.IConstantLayer
            addresses[layer.get_output(0).name] = layer.weights.ctypes.data
    assert addresses == {name: raw.data.ctypes.data for name, raw in network.constants.items()}


def test_int4_constants_are_packed_pairs_along_the_outputs(v2: models.Model) -> None:
    name = "layers.0.mlp.fc"
    program = v2.program()
    assert program.tensors[f"{name}.weight"].dtype == "int4"
    assert program.tensors[f"{name}.weight"].shape == (128, 256)
    assert program.tensors[f"{name}.weights_scaling_factor"].shape == (2, 256)
    packed = program.constants[f"{name}.weight"].data.reshape(128, 128)
    stored = v2.source.raw[f"transformer.{name}.weight"].data.reshape(128, 128)
    for row, column in ((0, 0), (3, 77), (127, 127)):
        assert packed[row, column] == stored[column, row]


def test_names_are_places_in_the_model(v2: models.Model) -> None:
    program = v2.program()
    assert "(Unnamed" not in json.dumps(program.dump())
    assert len(program.tensors) == len(program.inputs) + len(program.constants) + sum(
        len(n.outputs) for n in program.nodes
    )
    assert len({node.name for node in program.nodes}) == len(program.nodes)
    assert "layers.1.mlp.experts.fc.dequantize" in {node.name for node in program.nodes}


def test_the_digest_is_the_same_in_another_process(v2: models.Model, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests import fixtures; from tests.network import models; "
        "model = models.load_int4(fixtures.deepseek_v2, Path(sys.argv[1]), pattern=r'mlp.*_proj\\.weight|o_proj', "
        "group=64, dtype='bfloat16', prescale='each'); print(model.program().digest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hf")], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == v2.program().digest()


def test_any_one_weight_changes_the_digest(v2: models.Model) -> None:
    """One bit of each tensor of a routed layer (of one expert), of the embedding and of the head in turn."""
    layer = [name for name in v2.source.raw if name.startswith("transformer.layers.1.")]
    cases = {name: (1, 2) for name in layer if ".experts." not in name or ".experts.3." in name}
    cases |= {"transformer.vocab_embedding.weight": (0, 1), "transformer.ln_f.weight": (2, 3), "lm_head.weight": (2, 3)}
    plain = {layers: v2.program(layers=layers).digest() for layers in set(cases.values())}
    digests = set(plain.values())
    for name, layers in cases.items():
        raw = v2.source.raw[name]
        damaged = raw.data.copy()
        # Scales must stay representable in bfloat16: damage a bit that it keeps.
        damaged[damaged.size // 2 // 4 * 4 + (2 if raw.dtype == "F32" else 0)] ^= 1
        source = models.MemorySource({**v2.source.raw, name: RawTensor(raw.dtype, raw.shape, damaged)})
        digests.add(models.read_program(v2.spec(layers=layers), v2.architecture, source).digest())
    assert len(digests) == len(plain) + len(cases)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-5},
        {"rope_theta": 20000},
        {"routed_scaling_factor": 3.0},
        {"num_experts_per_tok": 3},
        {"topk_group": 1},
        {"topk_method": "greedy"},
        {"norm_topk_prob": True},
        {"rope_scaling": None},
    ],
    ids=str,
)
def test_any_one_attribute_changes_the_digest(change: dict[str, Any], v2: models.Model) -> None:
    config = json.loads((v2.path / "config.json").read_text())
    changed = parse_architecture({**config, **change})
    spec = v2.spec(layers=(1, 2))
    digests = {models.read_program(spec, one, v2.source).digest() for one in (changed, v2.architecture)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    "change", [{"block_size": 16}, {"max_seq_len": 255}, {"moe": "gather"}, {"layers": (0, 2)}], ids=str
)
def test_the_spec_is_in_the_digest(change: dict[str, Any], v2: models.Model) -> None:
    assert v2.program(**{"layers": (1, 2), **change}).digest() != v2.program(layers=(1, 2)).digest()


def test_a_ranks_network_has_its_own_digest(llama: models.Model) -> None:
    ranks = (Rank(), *Parallel(tensor=2).ranks)
    assert len({llama.program(layers=(1, 2), rank=rank).digest() for rank in ranks}) == len(ranks)


def test_a_rank_has_pools_of_its_own_heads(llama: models.Model, v2: models.Model) -> None:
    spec = llama.spec(rank=Rank(Parallel(tensor=2, pipeline=3), 3))
    assert [(pool.name, pool.axes) for pool in inputs.pools(llama.architecture, spec)] == [
        ("k_pool_1", ("NB", 1, 8, 32)),
        ("v_pool_1", ("NB", 1, 8, 32)),
    ]
    (pool,) = inputs.layer_pools(v2.architecture, v2.spec(rank=Rank(Parallel(tensor=4), 1)), 0)
    assert pool.axes == ("NB", 1, 8, 80)


def test_layers_of_another_stage_are_refused(llama: models.Model) -> None:
    spec = llama.spec(rank=Rank(Parallel(pipeline=3), 1), layers=(0, 2))
    with pytest.raises(CompatibilityError, match=r"layers \[0, 2\) is no slice of its stage's layers \[1, 2\)"):
        spec.layer_range(llama.architecture)


def test_a_model_that_does_not_divide_is_refused(llama: models.Model) -> None:
    with pytest.raises(
        CompatibilityError, match=r"tensor parallel size 4 does not divide .* 2 key/value heads"
    ) as caught:
        llama.program(rank=Rank(Parallel(tensor=4), 0))
    assert caught.value.hint == "tensor sizes that would work: 1, 2"


def test_a_spec_survives_json() -> None:
    for spec in (
        NetworkSpec(dtype="float16", max_seq_len=4096),
        NetworkSpec(dtype="bfloat16", max_seq_len=1, block_size=32, moe="gather", layers=(3, 7)),
        NetworkSpec(dtype="bfloat16", max_seq_len=1, rank=Rank(Parallel(tensor=4, pipeline=2, expert=2), 5)),
    ):
        assert NetworkSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("text", ['{"dtype": "float16"}', '{"dtype": "float16", "max_seq_len": 8, "heads": 3}'])
def test_a_spec_of_another_version_is_refused(text: str) -> None:
    with pytest.raises(CompatibilityError, match="has the keys"):
        NetworkSpec.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "dtype 'float64' is unknown"),
        ({"moe": "sparse"}, "moe lowering 'sparse' is unknown"),
        ({"block_size": 0}, "must be positive"),
    ],
)
def test_a_spec_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CompatibilityError, match=message):
        replace(NetworkSpec(dtype="float16", max_seq_len=8), **change)


def test_tied_embeddings_are_one_constant(tmp_path: Path) -> None:
    model = models.load(fixtures.llama(tmp_path / "hf", tie_word_embeddings=True))
    program = model.program()
    users = [node.name for node in program.nodes if "vocab_embedding.weight" in node.inputs]
    assert users == ["embedding", "lm_head"]
    assert "lm_head.weight" not in program.constants
    # A last slice has no embedding of its own but still needs the tied head.
    assert "vocab_embedding.weight" in model.program(layers=(2, 3)).constants


def test_rope_tables_hold_as_many_rows_as_asked(llama: models.Model) -> None:
    program = llama.program(max_seq_len=100)
    assert program.tensors["rope.cos"].shape == (100, 16)
    np.testing.assert_array_equal(program.constants["rope.cos"].data[:4].view(np.float32), [1.0])
