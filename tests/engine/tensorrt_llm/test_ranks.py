"""Rank checkpoints of every architecture and method: their tables, the proof that they are the model, and resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.engine.tensorrt_llm.ranks import write_ranks
from pipeline.errors import CheckpointError, CompatibilityError, StoreError
from pipeline.evaluation.rank_proof import prove_ranks
from pipeline.sharding import Parallel
from pipeline.workspace import FolderWorkspace
from tests.checkpoint.foreign import cases as foreign
from tests.checkpoint.foreign.test_convert import convert
from tests.engine.tensorrt_llm import golden
from tests.engine.tensorrt_llm.rank_cases import make_engine, write

Engines = Callable[[str], CheckpointFolder]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Each case's engine checkpoint, made once."""
    made: dict[str, CheckpointFolder] = {}

    def get(case: str) -> CheckpointFolder:
        if case not in made:
            made[case] = make_engine(tmp_path_factory.mktemp(case), *case.split("-"))
        return made[case]

    return get


@pytest.mark.parametrize("case", golden.CASES)
def test_tables(case: str, engines: Engines, tmp_path: Path) -> None:
    expected = (golden.FOLDER / f"{case}.txt").read_text()
    assert golden.describe(engines(case), golden.CASES[case], tmp_path) == expected


@pytest.mark.parametrize("case", golden.CASES)
def test_ranks_are_the_engine_checkpoint(case: str, engines: Engines, tmp_path: Path) -> None:
    """Every tensor, by a loader that knows nothing of the writer."""
    engine = engines(case)
    write(engine, tmp_path / "ranks", tensor=2, pipeline=2)
    proof = prove_ranks(tmp_path / "ranks", engine, sm=90, tokens=0)
    assert proof.holds, proof.differing
    assert proof.tensors == len(engine.tensors)
    assert {name.rpartition(".")[2] for name in proof.rounded} <= {
        "per_channel_scale",
        "weight",
        "weights_scaling_factor",
    }
    assert bool(proof.rounded) == (case.endswith("-int8") or case == "deepseek_moe-fp8")


@pytest.mark.parametrize("case", ["llama-awq", "deepseek_moe-plain"])
def test_ranks_give_the_models_logits(case: str, engines: Engines, tmp_path: Path) -> None:
    engine = engines(case)
    write(engine, tmp_path / "ranks", tensor=2, expert=2 if "moe" in case else 1)
    proof = prove_ranks(tmp_path / "ranks", engine, sm=90, tokens=8)
    assert (proof.holds, proof.logits, proof.tokens) == (True, 0.0, 8)


@pytest.mark.slow
@pytest.mark.parametrize("case", golden.CASES)
def test_ranks_of_all_sizes_give_the_models_logits(case: str, engines: Engines, tmp_path: Path) -> None:
    engine = engines(case)
    for index, sizes in enumerate(golden.CASES[case]):
        write(engine, tmp_path / str(index), **sizes)
        proof = prove_ranks(tmp_path / str(index), engine, sm=90, tokens=12)
        assert proof.holds, (sizes, proof.differing)
        assert proof.logits <= (0.05 if case == "deepseek_moe-fp8" else 2e-3 if case.endswith("-int8") else 0.0)


@pytest.mark.parametrize(("case", "sm"), [("llama-gptq", 80), ("llama-gptq", 120), ("llama-int8", 89)])
def test_processed_weights_of_other_gpus(case: str, sm: int, engines: Engines, tmp_path: Path) -> None:
    engine = engines(case)
    write(engine, tmp_path / "ranks", sm=sm, tensor=2)
    assert prove_ranks(tmp_path / "ranks", engine, sm=sm, tokens=0).holds
    assert not prove_ranks(tmp_path / "ranks", engine, sm=90, tokens=0).holds


def test_heads_on_several_ranks(engines: Engines, tmp_path: Path) -> None:
    """Four ranks have two key/value heads, biases and INT4 rows in pairs among them."""
    engine = make_engine(tmp_path, "qwen2", "awq", num_key_value_heads=2, settings={"group_size": 64, "method": "rtn"})
    write(engine, tmp_path / "ranks", tensor=4)
    assert prove_ranks(tmp_path / "ranks", engine, sm=90, tokens=0).holds
    files = [load_file(tmp_path / "ranks" / f"rank{rank}.safetensors") for rank in range(4)]
    bias = [file["transformer.layers.0.attention.qkv.bias"] for file in files]  # two queries, a key, a value of 32
    assert torch.equal(bias[0][64:], bias[1][64:]) and torch.equal(bias[2][64:], bias[3][64:])
    assert not torch.equal(bias[1][64:], bias[2][64:])


def test_a_shared_embedding_is_the_head(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, "llama", "plain", tie_word_embeddings=True)
    write(engine, tmp_path / "ranks", tensor=2, pipeline=2)
    proof = prove_ranks(tmp_path / "ranks", engine, sm=90, tokens=4)
    assert (proof.holds, proof.logits) == (True, 0.0)
    first, last = (load_file(tmp_path / "ranks" / f"rank{rank}.safetensors") for rank in (1, 3))
    assert torch.equal(first["transformer.vocab_embedding.weight"], last["lm_head.weight"])
    assert last["lm_head.weight"].shape[0] == 130 and not last["lm_head.weight"][-1].any()  # 259 of 260 rows


def test_biases_of_every_linear(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, "llama", "plain", attention_bias=True, mlp_bias=True)
    write(engine, tmp_path / "ranks", tensor=2)
    assert prove_ranks(tmp_path / "ranks", engine, sm=90, tokens=0).holds


def test_halves_with_two_scales_are_not_to_be_fused(engines: Engines, tmp_path: Path) -> None:
    report = write(engines("llama-fp8"), tmp_path / "llama")
    assert report.unfused_mlp and not report.requantized
    report = write(engines("deepseek_moe-fp8"), tmp_path / "moe")
    halves = {name.rpartition(".")[0] for name in report.requantized}
    assert halves <= {f"transformer.layers.1.mlp.experts.{e}" for e in range(8)} | {
        "transformer.layers.1.mlp.shared_expert"
    }
    assert len(halves) == len(report.requantized) > 0


def test_a_killed_run_goes_on_at_its_rank(engines: Engines, tmp_path: Path) -> None:
    engine, folder = engines("llama-plain"), tmp_path / "ranks"

    class Killed(FolderWorkspace):
        def finish(self, step: str, files: object) -> None:
            if step == "rank1.safetensors":
                raise KeyboardInterrupt
            super().finish(step, files)  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        write_ranks(engine, Killed(folder, journal=tmp_path / "journal"), parallel=Parallel(tensor=2), sm=90)
    before = (folder / "rank0.safetensors").stat().st_mtime_ns
    assert not (folder / "config.json").exists()
    write_ranks(engine, FolderWorkspace(folder, journal=tmp_path / "journal"), parallel=Parallel(tensor=2), sm=90)
    assert (folder / "rank0.safetensors").stat().st_mtime_ns == before
    assert prove_ranks(folder, engine, sm=90, tokens=0).holds


def test_same_checkpoint_same_bytes(engines: Engines, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(engines("llama-gptq"), tmp_path / name, tensor=2)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_full_disk_is_refused_first(engines: Engines, tmp_path: Path) -> None:
    class Full(FolderWorkspace):
        def require(self, nbytes: int) -> None:
            assert nbytes == sum(info.nbytes for info in engine.tensors.values())
            raise StoreError("full")

    engine = engines("llama-plain")
    with pytest.raises(StoreError):
        write_ranks(engine, Full(tmp_path / "ranks", journal=tmp_path / "journal"), parallel=Parallel(), sm=90)
    assert list((tmp_path / "ranks").iterdir()) == []


def test_fp8_with_a_scale_for_each_output_is_refused(tmp_path: Path) -> None:
    """As others' checkpoints may have it of q, k and v; TensorRT-LLM's engines have one scale for the three."""
    engine, _ = convert(foreign.write("modelopt-fp8", tmp_path), tmp_path / "engine", dtype="float16")
    with pytest.raises(CompatibilityError, match=r"attention\.qkv is FP8 with a scale for each output"):
        write(engine, tmp_path / "ranks")
    assert not list((tmp_path / "ranks").glob("*"))


def test_what_cannot_run_is_refused(engines: Engines, tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match="on SM100: INT8 and INT4 are what") as refused:
        write(engines("llama-awq"), tmp_path / "ranks", sm=100)
    assert "method fp8" in refused.value.hint
    with pytest.raises(CompatibilityError, match="multi-head latent attention"):
        write(make_engine(tmp_path, "deepseek_v2", "plain", num_hidden_layers=2, vocab_size=512), tmp_path / "v2")
    hub = CheckpointFolder.open(tmp_path / "hub")
    with pytest.raises(CheckpointError, match="no engine checkpoint"):
        write(hub, tmp_path / "hub-ranks")
