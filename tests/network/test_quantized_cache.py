"""Networks over pools in INT8 and FP8: near the native network's wide ones, and refused where they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.layouts.scales import cache_scale
from pipeline.checkpoint.tensors import RawTensor
from pipeline.errors import CheckpointError, CompatibilityError
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.network.widening import widen, widen_cache
from pipeline.sharding import Parallel
from tests import fixtures
from tests.network import models
from tests.network.ranks import Ranks
from tests.network.serving import prompts, serve

PLUGINS = Lowering(rope_paged_kv="plugin", paged_attention="plugin")
LARGEST = {"int8": 127, "fp8": 448}
TP2 = Parallel(2)


def load(write: Any, path: Path, kind: str, **options: Any) -> models.Model:
    """With a scale for values of up to 4, which these models' hardly exceed."""
    model = models.load(write(path, num_hidden_layers=2, **options))
    for layer in range(model.architecture.num_layers):
        model.source.raw[cache_scale(layer)] = RawTensor.from_torch(torch.tensor([4.0 / LARGEST[kind]]))
    return model


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize("write", [fixtures.llama, fixtures.deepseek_v2], ids=["llama", "v2"])
def test_a_quantized_cache_is_near_a_wide_one(write: Any, kind: str, tmp_path: Path) -> None:
    model = load(write, tmp_path / "hf", kind, dtype="float16")
    program = model.program(lowering=PLUGINS, kv_cache=kind)
    pools = [spec for spec in program.inputs if "_pool_" in spec.name]
    assert {spec.dtype for spec in pools} == {kind} and len(pools) == 2 * len(model.architecture.cache_widths)
    assert {spec.dtype for spec in program.outputs if spec.name.endswith("_out")} == {kind}
    assert program.digest() != model.program(lowering=PLUGINS).digest()
    sequences = prompts(model.architecture.vocab_size)
    native, wide, quantized = (
        serve(each, sequences=sequences) for each in (model.program(), widen_cache(program), program)
    )
    for one, other, rounded in zip(native, wide, quantized, strict=True):
        torch.testing.assert_close(one["logits"], other["logits"], rtol=0, atol=1e-5)
        rows = (rounded["logits"] - one["logits"]).square().mean(-1).sqrt()
        assert 1e-3 < float(rows.median()) / rms(one["logits"]) < 0.1


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.mark.parametrize(
    ("write", "kind", "heads"), [(fixtures.llama, "fp8", 1), (fixtures.deepseek_v2, "int8", 1)], ids=["llama", "v2"]
)
def test_ranks_quantize_their_own_heads(write: Any, kind: str, heads: int, ranks: Ranks, tmp_path: Path) -> None:
    """Or, of MLA, each the same latent. A sum in another order may tip a value to the next step: few do."""
    model = load(write, tmp_path / "hf", kind, dtype="float32")
    options: dict[str, Any] = {"lowering": PLUGINS, "kv_cache": kind}
    programs = [model.program(rank=rank, **options) for rank in TP2.ranks]
    assert {spec.shape[1] for spec in programs[0].inputs if "_pool_" in spec.name} == {heads}
    sequences = prompts(model.architecture.vocab_size)
    whole = serve(model.program(**options), sequences=sequences)
    first, second = ranks.serve(TP2, programs, sequences=sequences)
    for one, other, wanted in zip(first, second, whole, strict=True):
        assert torch.equal(one["logits"], other["logits"])
        difference = (one["logits"] - wanted["logits"]).square().mean(-1).sqrt()
        assert float(difference.median()) < 5e-3 * rms(wanted["logits"])


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match="in int8 is the plugins', and paged_attention would be native"):
        NetworkSpec(dtype="float16", max_seq_len=64, kv_cache="int8", lowering=Lowering(rope_paged_kv="plugin"))
    with pytest.raises(CompatibilityError, match="KV cache 'int4' is unknown"):
        NetworkSpec(dtype="float16", max_seq_len=64, kv_cache="int4", lowering=PLUGINS)
    model = load(fixtures.llama, tmp_path / "hf", "fp8")
    model.source.raw[cache_scale(1)] = RawTensor.from_torch(torch.tensor([float("nan")]))
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.kv_cache_scaling_factor holds scales"):
        model.program(lowering=PLUGINS, kv_cache="fp8")
    del model.source.raw[cache_scale(1)]
    with pytest.raises(CheckpointError, match=r"kv_cache_scaling_factor is missing, which a KV cache in fp8 needs"):
        model.program(lowering=PLUGINS, kv_cache="fp8")
    assert model.program(lowering=PLUGINS).inputs[-1].dtype == "bfloat16"  # scales are no harm to a wide one


def test_the_choice_is_written_and_read() -> None:
    spec = NetworkSpec(dtype="float16", max_seq_len=64, kv_cache="fp8", lowering=PLUGINS)
    assert NetworkSpec.from_json(spec.to_json()) == spec
    assert (spec.pool_dtype, NetworkSpec(dtype="float16", max_seq_len=64).pool_dtype) == ("fp8", "float16")


def test_widening_a_wide_network_changes_nothing(tmp_path: Path) -> None:
    program = models.load(fixtures.llama(tmp_path / "hf", num_hidden_layers=1)).program(lowering=PLUGINS)
    assert widen(program).digest() == program.digest()
