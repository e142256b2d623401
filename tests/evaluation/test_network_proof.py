"""The proof passes on right networks, whole and in slices, and fails on every fault that conversions are known for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layouts.scales import cache_scale
from pipeline.config.proof import Gates
from pipeline.evaluation import network_proof, reference
from pipeline.evaluation.conversion_proof import ConversionProof
from pipeline.evaluation.judgement import judge_proofs
from pipeline.evaluation.network_findings import NetworkProof, find_worst
from pipeline.evaluation.network_proof import prove_network
from pipeline.evaluation.schedule import make_sequences
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.progress import SILENT
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.evaluation.support import Altered, convert
from tests.quantization.support import CalibrationSettings, Settings

PLUGINS = Lowering(rope_paged_kv="plugin", paged_attention="plugin")
PROMPTS = ((5, 9, 301, 44, 7, 8, 120, 66, 31, 250, 18), (400, 3, 77), (11, 12, 13, 14, 15))


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    folder = tmp_path_factory.mktemp("v2")
    return convert(fixtures.deepseek_v2(folder / "hf", num_hidden_layers=2), folder / "engine")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    folder = tmp_path_factory.mktemp("llama")
    return convert(fixtures.llama(folder / "hf", rope="yarn", num_hidden_layers=2), folder / "engine")


def prove(
    built: CheckpointFolder,
    network: object = None,
    *,
    sliced: bool = False,
    dtype: str = "float32",
    router_margin: float = 1e-5,
    lowering: Lowering | None = None,
    kv_cache: str = "model",
) -> NetworkProof:
    """Proves `network` (a source of weights; default `built` itself) against transformers on `built`."""
    spec = NetworkSpec(dtype=dtype, max_seq_len=256, block_size=4, lowering=lowering or Lowering(), kv_cache=kv_cache)
    sequences = make_sequences(PROMPTS, decode_tokens=3, architecture=built.architecture, max_seq_len=256)
    layers = built.architecture.num_layers
    whole = compute = reference.compute_reference
    if network is not None:
        # The reference keeps the true weights; the network gets the altered ones.
        def whole(_source, *rest, **options):  # type: ignore[no-untyped-def]
            return compute(built, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_proof, "compute_reference", whole)
        return prove_network(
            network or built,  # type: ignore[arg-type]
            built.config,
            built.architecture,
            spec,
            sequences,
            prefill_chunk=4,
            router_margin=router_margin,
            segments=[(layer, layer + 1) for layer in range(layers)] if sliced else [(0, layers)],
            progress=SILENT,
        )


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("name", ["latent", "llama"])
def test_right_networks_pass_whole_and_in_slices(name: str, sliced: bool, request: pytest.FixtureRequest) -> None:
    proof = prove(request.getfixturevalue(name), sliced=sliced)
    assert proof.max_logit_error < 2e-5
    assert max(proof.layer_errors) < 2e-5
    assert proof.declared_error <= proof.declared_bound
    assert proof.mixed_steps >= 2
    assert proof.positions + proof.left_out == sum(len(p) + 3 for p in PROMPTS) + len(PROMPTS[0]) + 3


def swap_heads(w: torch.Tensor) -> torch.Tensor:
    return torch.cat([w[32:64], w[:32], w[64:]])


FAULTS: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "two heads of q swapped": ("llama", "transformer.layers.1.attention.qkv.weight", swap_heads),
    "rows of the gate projection in another order": (
        "llama",
        "transformer.layers.1.mlp.fc.weight",
        lambda w: w.flip(0),
    ),
    "a norm left at one": ("llama", "transformer.layers.1.post_layernorm.weight", torch.ones_like),
    "rows of kv_b in another order": ("latent", "transformer.layers.1.attention.kv_b_proj.weight", swap_heads),
    "one expert's weight off by 1 %": (
        "latent",
        "transformer.layers.1.mlp.experts.3.proj.weight",
        lambda w: w * 1.01,
    ),
    "the router's rows in another order": ("latent", "transformer.layers.1.mlp.router.weight", lambda w: w.roll(1, 0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_network_fails_and_its_layer_is_named(fault: str, request: pytest.FixtureRequest) -> None:
    name, tensor, edit = FAULTS[fault]
    built: CheckpointFolder = request.getfixturevalue(name)
    proof = prove(built, Altered(built, {tensor: edit}))
    assert proof.max_logit_error > 1e-4
    assert proof.worst_layer == 1
    assert proof.layer_errors[0] < 2e-5


def test_a_dropped_rope_scaling_fails(llama: CheckpointFolder) -> None:
    import dataclasses

    unscaled = dataclasses.replace(llama.architecture.rope, kind="default", scaling={})
    architecture = dataclasses.replace(llama.architecture, rope=unscaled)
    original = llama.architecture
    try:
        llama.architecture = architecture
        proof = prove(llama)
    finally:
        llama.architecture = original
    assert proof.max_logit_error > 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_declared_types_stay_under_the_bound_derived_from_them(tmp_path: Path, dtype: str) -> None:
    built = convert(fixtures.llama(tmp_path / "hf"), tmp_path / "engine", dtype)
    proof = prove(built, dtype=dtype)
    assert 0 < proof.declared_error <= proof.declared_bound
    assert proof.max_logit_error < 1e-4


def test_sequences_past_the_original_context_are_added_where_the_engine_reaches_them(
    llama: CheckpointFolder,
) -> None:
    short = make_sequences(PROMPTS, decode_tokens=3, architecture=llama.architecture, max_seq_len=64)
    long = make_sequences(PROMPTS, decode_tokens=3, architecture=llama.architecture, max_seq_len=256)
    assert [s.offset for s in short] == [0, 0, 0]
    assert [s.offset for s in long] == [0, 0, 0, 64]  # the fixture's original_max_position_embeddings


def test_nothing_compared_is_nothing_proved(latent: CheckpointFolder) -> None:
    proof = prove(latent, router_margin=1.0)
    assert proof.positions == 0
    assert proof.max_logit_error == math.inf


@pytest.mark.parametrize("side", ["network", "transformers"])
def test_values_that_are_not_finite_never_pass(llama: CheckpointFolder, side: str) -> None:
    broken = Altered(llama, {"transformer.layers.1.post_layernorm.weight": lambda w: w * math.nan})
    proof = prove(llama, broken) if side == "network" else prove(broken, llama)  # type: ignore[arg-type]
    assert proof.max_logit_error == math.inf
    assert proof.worst_layer == 1


def test_the_worst_layer_adds_most_or_is_the_first_that_is_not_finite() -> None:
    assert find_worst([0.1, 0.4, 0.5]) == 1
    assert find_worst([0.1, math.nan, math.inf]) == 1


@pytest.mark.parametrize("method", ["fp8", "smoothquant"])
def test_rounded_inputs_do_not_hide_the_rest(method: str, tmp_path: Path) -> None:
    """W8A8 is proved to as many digits as the others: on its dequantized weights, its inputs as they are."""
    hub = fixtures.llama(tmp_path / "hf", tokenizer=True, num_hidden_layers=2)
    built = convert(hub, tmp_path / "engine")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(400)))
    settings = Settings(method=method, calibration=CalibrationSettings(files=(text,), samples=6, length=24))
    quantize_checkpoint(built, FolderWorkspace(tmp_path / "out"), settings=settings)
    quantized = CheckpointFolder.open(tmp_path / "out")
    assert prove(quantized).max_logit_error < 1e-4
    scale = "transformer.layers.1.mlp.fc.weights_scaling_factor"
    assert prove(quantized, Altered(quantized, {scale: lambda s: s * 1.01})).max_logit_error > 1e-4


def test_plugins_are_proved_with_the_network_without_them(llama: CheckpointFolder) -> None:
    proof = prove(llama, lowering=PLUGINS)
    assert proof.max_logit_error < 1e-4
    assert proof.native is not None
    assert proof.native.plugins == ("rope_paged_kv", "paged_attention")
    assert proof.native.max_logit_error < 1e-4
    assert proof.native.max_difference < 1e-4
    assert prove(llama).native is None


@pytest.mark.parametrize(("kind", "sliced"), [("int8", False), ("fp8", True)])
def test_a_quantized_cache_is_held_against_the_wide_one(kind: str, sliced: bool, tmp_path: Path) -> None:
    """Where its rounding is left out, the network is proved to as many digits as any other."""
    built = convert(fixtures.llama(tmp_path / "hf", tokenizer=True, num_hidden_layers=2), tmp_path / "engine")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(400)))
    calibration = CalibrationSettings(files=(text,), samples=2, length=16)
    settings = Settings(method="int8", kv_cache=kind, calibration=calibration)
    quantize_checkpoint(built, FolderWorkspace(tmp_path / "out"), settings=settings)
    quantized = CheckpointFolder.open(tmp_path / "out")
    proof = prove(quantized, lowering=PLUGINS, kv_cache=kind, sliced=sliced)
    assert proof.cache is not None and proof.native is not None and proof.cache.kind == kind
    assert max(proof.max_logit_error, proof.native.max_difference) < 1e-4
    assert 1e-3 < proof.cache.error < proof.cache.bound == 2**-4 * 2
    nothing_converted = ConversionProof(tensors=0, elements=0, differing={}, clipped=0)
    gates = {gate.name: gate for gate in judge_proofs(Gates(), nothing_converted, proof)}
    assert gates["network_cache"].passed and gates["network_cache"].value == proof.cache.error
    cut = Altered(quantized, {cache_scale(layer): lambda s: s / 2 for layer in range(2)})
    worse = prove(quantized, cut, lowering=PLUGINS, kv_cache=kind, sliced=sliced)
    assert worse.cache is not None and worse.cache.error > proof.cache.bound and worse.max_logit_error < 1e-4


def test_experts_in_a_plugin_are_proved_too(latent: CheckpointFolder) -> None:
    proof = prove(latent, lowering=Lowering(moe_experts="plugin"))
    assert proof.native is not None and proof.native.plugins == ("moe_experts",)
    assert max(proof.max_logit_error, proof.native.max_logit_error, proof.native.max_difference) < 1e-4


def test_a_plugin_that_computes_something_else_is_seen(
    llama: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plugins.rope_paged_kv import reference as rope

    rotate = rope._rotate
    monkeypatch.setattr(rope, "_rotate", lambda x, turns, size, pairs: rotate(x, turns, size, not pairs))
    nothing_converted = ConversionProof(tensors=0, elements=0, differing={}, clipped=0)
    proof = prove(llama, lowering=PLUGINS)
    assert proof.native is not None and proof.native.max_logit_error < 1e-4
    assert min(proof.native.max_difference, proof.max_logit_error) > 1e-3
    names = {gate.name: gate.passed for gate in judge_proofs(Gates(), nothing_converted, proof)}
    assert names["network_native"] and not names["lowerings_agree"] and not names["network_exact"]
