"""Conversions against tensors put together by hand, what they refuse, and what a killed one repeats."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.conversion_report import ConversionReport
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import CheckpointError, ConfigError
from pipeline.workspace import FolderWorkspace
from tests import fixtures


def load_all(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def convert(source: Path, output: Path, *, dtype: str | None = None, overflow: str = "refuse", **options: Any) -> Any:
    folder = CheckpointFolder.open(source)
    workspace = FolderWorkspace(output, journal=output.with_name(output.name + ".journal"))
    return convert_checkpoint(folder, workspace, dtype=dtype, overflow=overflow, **options)


def digest(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def expected_llama(hf: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    engine = {
        "transformer.vocab_embedding.weight": hf["model.embed_tokens.weight"],
        "transformer.ln_f.weight": hf["model.norm.weight"],
        "lm_head.weight": hf["lm_head.weight"],
    }
    for i in range(layers):
        layer = {name.removeprefix(f"model.layers.{i}."): t for name, t in hf.items() if f".{i}." in name}
        qkv = torch.cat([layer[f"self_attn.{part}_proj.weight"] for part in "qkv"])
        engine |= {
            f"transformer.layers.{i}.input_layernorm.weight": layer["input_layernorm.weight"],
            f"transformer.layers.{i}.attention.qkv.weight": qkv,
            f"transformer.layers.{i}.attention.dense.weight": layer["self_attn.o_proj.weight"],
            f"transformer.layers.{i}.post_layernorm.weight": layer["post_attention_layernorm.weight"],
            f"transformer.layers.{i}.mlp.fc.weight": layer["mlp.gate_proj.weight"],
            f"transformer.layers.{i}.mlp.gate.weight": layer["mlp.up_proj.weight"],
            f"transformer.layers.{i}.mlp.proj.weight": layer["mlp.down_proj.weight"],
        }
    return engine


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32"])
def test_llama_is_what_the_names_say(dtype: str | None, llama_path: Path, tmp_path: Path) -> None:
    report = convert(llama_path, tmp_path / "engine", dtype=dtype)
    target = getattr(torch, dtype or "bfloat16")
    expected = expected_llama(load_all(llama_path), 3)
    found = load_all(tmp_path / "engine")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == target
        assert torch.equal(found[name], tensor.to(target)), name
    assert (report.dtype, report.tensors, report.overflow) == (str(target).removeprefix("torch."), len(expected), {})
    assert report.casts == ({} if target == torch.bfloat16 else {f"BF16 -> {dtype_name(target)}": 30})


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float16: "F16", torch.float32: "F32"}[dtype]


def test_deepseek_v2_routed_layer(deepseek_v2_path: Path, tmp_path: Path) -> None:
    convert(deepseek_v2_path, tmp_path / "engine")
    hf, engine = load_all(deepseek_v2_path), load_all(tmp_path / "engine")
    pairs = {
        "attention.q_a_proj": "self_attn.q_a_proj",
        "attention.q_b_proj": "self_attn.q_b_proj",
        "attention.q_a_layernorm": "self_attn.q_a_layernorm",
        "attention.kv_a_proj_with_mqa": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_a_layernorm": "self_attn.kv_a_layernorm",
        "attention.kv_b_proj": "self_attn.kv_b_proj",
        "attention.dense": "self_attn.o_proj",
        "mlp.router": "mlp.gate",
        "mlp.shared_expert.fc": "mlp.shared_experts.gate_proj",
        "mlp.shared_expert.gate": "mlp.shared_experts.up_proj",
        "mlp.shared_expert.proj": "mlp.shared_experts.down_proj",
        "mlp.experts.15.fc": "mlp.experts.15.gate_proj",
        "mlp.experts.15.gate": "mlp.experts.15.up_proj",
        "mlp.experts.15.proj": "mlp.experts.15.down_proj",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(engine[f"transformer.layers.2.{ours}.weight"], hf[f"model.layers.2.{theirs}.weight"]), ours
    assert len(engine) == len(hf)  # nothing is fused in this architecture


def test_folder_is_a_checkpoint_with_config_tokenizer_and_index(llama_path: Path, tmp_path: Path) -> None:
    report = convert(llama_path, tmp_path / "engine", dtype="float16", max_shard=300_000)
    engine = CheckpointFolder.open(tmp_path / "engine")  # checks the index against every header
    assert engine.architecture.dtype == "float16"
    assert engine.config["trtseek"] == {"format": 1, "dtype": "float16", "quantization": None}
    before, after = json.loads((llama_path / "config.json").read_text()), dict(engine.config)
    after.pop("trtseek")
    assert list(after) == list(before)
    assert after == before | {"torch_dtype": "float16"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "engine" / name).read_bytes() == (llama_path / name).read_bytes()
    assert ConversionReport.read(tmp_path / "engine" / "conversion.json") == report
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "engine" / name).values()) for name in report.shards]
    assert len(sizes) > 3 and max(sizes) <= 300_000
    assert sorted(f.name for f in (tmp_path / "engine").glob("*.safetensors")) == report.shards
    assert not (tmp_path / "engine" / "losses").exists()


@pytest.mark.parametrize("rope", fixtures.LLAMA_ROPES)
def test_rope_scaling_is_carried(rope: str, tmp_path: Path) -> None:
    source = CheckpointFolder.open(fixtures.llama(tmp_path / "hf", rope=rope, num_hidden_layers=1))
    convert(source.path, tmp_path / "engine")
    engine = CheckpointFolder.open(tmp_path / "engine")
    assert engine.architecture == source.architecture
    assert engine.config["rope_scaling"] == fixtures.LLAMA_ROPES[rope]


def test_unusual_config_text_survives(tmp_path: Path) -> None:
    path = fixtures.llama(tmp_path / "hf", num_hidden_layers=1)
    text = (path / "config.json").read_text().replace("1e-06", "1.0E-6").replace('"use_cache": true', '"x": {"é":  1}')
    (path / "config.json").write_text(text)
    convert(path, tmp_path / "engine")
    written = (tmp_path / "engine" / "config.json").read_text()
    assert written.startswith(text.rstrip("}\n"))


def test_mixed_types_become_the_one_of_most_bytes(tmp_path: Path) -> None:
    def widen_norms(tensors: fixtures.Tensors) -> None:
        tensors.update({name: t.float() for name, t in tensors.items() if "norm" in name})

    path = fixtures.llama(tmp_path / "hf", edit=widen_norms, torch_dtype="float32", num_hidden_layers=1)
    report = convert(path, tmp_path / "engine")
    assert report.dtype == "bfloat16"
    assert report.casts == {"F32 -> BF16": 3}
    assert {t.dtype for t in load_all(tmp_path / "engine").values()} == {torch.bfloat16}
    assert CheckpointFolder.open(tmp_path / "engine").config["torch_dtype"] == "bfloat16"


def overflow_two(tensors: fixtures.Tensors) -> None:
    tensors["model.layers.0.self_attn.k_proj.weight"][1, 2] = 7e4
    tensors["model.layers.2.mlp.down_proj.weight"][3, 4:6] = -1e6


def test_overflow_is_refused_naming_the_worst(tmp_path: Path) -> None:
    path = fixtures.llama(tmp_path / "hf", edit=overflow_two)
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "engine", dtype="float16")
    message = caught.value.message
    assert "2 tensors do not fit float16" in message
    assert "model.layers.2.mlp.down_proj.weight with 2 values out of range, up to 999424" in message
    assert "bfloat16" in caught.value.hint and "clip" in caught.value.hint
    assert not list((tmp_path / "engine").glob("*.safetensors"))
    assert convert(path, tmp_path / "wide", dtype="bfloat16").overflow == {}


def test_one_value_out_of_range_is_one(tmp_path: Path) -> None:
    def enlarge(tensors: fixtures.Tensors) -> None:
        tensors["model.norm.weight"][0] = 7e4

    path = fixtures.llama(tmp_path / "hf", edit=enlarge)
    with pytest.raises(CheckpointError, match=r"1 tensor does not fit float16; .* with 1 value out of range"):
        convert(path, tmp_path / "engine", dtype="float16")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float16", None])
def test_what_is_not_finite_is_named_with_its_shard(tmp_path: Path, value: float, dtype: str | None) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: fixtures.Tensors) -> None:
        tensors[name][2, 3] = value

    path = fixtures.llama(tmp_path / "hf", edit=spoil)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "engine", dtype=dtype)
    assert caught.value.message.startswith(f"{path / index[name]}: {name} ")
    assert "[2, 3]" in caught.value.message


def test_overflow_is_clipped_and_counted_where_asked(tmp_path: Path) -> None:
    path = fixtures.llama(tmp_path / "hf", edit=overflow_two)
    report = convert(path, tmp_path / "engine", dtype="float16", overflow="clip")
    assert report.overflow == {
        "transformer.layers.0.attention.qkv.weight": (1, 70144.0),
        "transformer.layers.2.mlp.proj.weight": (2, 999424.0),
    }
    engine = load_all(tmp_path / "engine")
    assert engine["transformer.layers.0.attention.qkv.weight"][128 + 1, 2] == 65504
    assert engine["transformer.layers.2.mlp.proj.weight"][3, 4] == -65504


def test_underflow_is_counted(tmp_path: Path) -> None:
    def shrink(tensors: fixtures.Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][:2, :3] = 1e-9
        tensors["model.layers.0.mlp.up_proj.weight"][2] = 0.0

    path = fixtures.llama(tmp_path / "hf", edit=shrink, num_hidden_layers=1)
    report = convert(path, tmp_path / "engine", dtype="float16")
    assert report.underflow == {"transformer.layers.0.mlp.gate.weight": 6}


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("-inf"), "infinite")])
def test_non_finite_weight_is_refused_by_name_and_index(value: float, what: str, tmp_path: Path) -> None:
    def damage(tensors: fixtures.Tensors) -> None:
        tensors["model.layers.1.mlp.experts.5.up_proj.weight"][7, 11] = value

    path = fixtures.deepseek_v2(tmp_path / "hf", edit=damage)
    with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.experts\.5\.up_proj\.weight is {what} at \[7, 11\]"):
        convert(path, tmp_path / "engine")
    assert not list((tmp_path / "engine").glob("*.safetensors"))


def test_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    def damage(tensors: fixtures.Tensors) -> None:
        tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(128, 64, dtype=torch.bfloat16)

    path = fixtures.llama(tmp_path / "hf", edit=damage)
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "engine")
    for text in ("model.layers.1.self_attn.o_proj.weight", "[128, 64]", "[128, 128]", "num_attention_heads * head_dim"):
        assert text in caught.value.message


def test_unused_constants_are_reported(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = fixtures.llama(tmp_path / "hf", edit=lambda tensors: tensors.update({name: torch.ones(16)}))
    assert convert(path, tmp_path / "engine").unused == [name]


def test_tied_head_is_left_out(tmp_path: Path) -> None:
    convert(fixtures.llama(tmp_path / "hf", tie_word_embeddings=True), tmp_path / "engine")
    assert "lm_head.weight" not in load_all(tmp_path / "engine")


def test_sources_that_are_not_read_are_refused(llama_path: Path, tmp_path: Path) -> None:
    convert(llama_path, tmp_path / "engine")
    with pytest.raises(CheckpointError, match="engine checkpoint already"):
        convert(tmp_path / "engine", tmp_path / "again")
    for method, message in (("hqq", r"quantized \(hqq\)"), ("gptq", "is gptq, but no linear of .* is quantized")):
        stated = {"quant_method": method, "bits": 4}
        quantized = fixtures.llama(tmp_path / method, quantization_config=stated, num_hidden_layers=1)
        with pytest.raises(CheckpointError, match=message):
            convert(quantized, tmp_path / "again")

    def narrow(tensors: fixtures.Tensors) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    path = fixtures.llama(tmp_path / "f8", edit=narrow, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight is F8_E4M3"):
        convert(path, tmp_path / "again")


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": "float64"}, {"overflow": "ignore"}])
def test_unknown_settings_are_refused(options: dict[str, str], llama_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        convert(llama_path, tmp_path / "engine", **options)


class Killed(Exception):  # noqa: N818
    pass


class DyingWorkspace(FolderWorkspace):
    """Dies while writing down its third step: two shards are finished, the third is whole but not recorded."""

    def finish(self, step: str, files: Sequence[Path]) -> None:
        if len(self._steps) == 2:
            raise Killed
        super().finish(step, files)


def test_killed_conversion_goes_on_and_ends_in_the_same_bytes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float16", "overflow": "clip", "max_shard": 200_000}
    path = fixtures.deepseek_v2(tmp_path / "hf", edit=lambda t: t["model.embed_tokens.weight"].view(-1)[:9].fill_(1e5))
    whole = convert(path, tmp_path / "whole", **options)
    assert whole.overflow
    folder, killed = CheckpointFolder.open(path), tmp_path / "killed"
    with pytest.raises(Killed):
        convert_checkpoint(folder, DyingWorkspace(killed), **options)
    finished = {name: (killed / name).stat().st_mtime_ns for name in whole.shards[:2]}
    (killed / whole.shards[2]).write_bytes(b"half")
    resumed = convert_checkpoint(folder, FolderWorkspace(killed), **options)
    assert resumed == whole
    assert {name: (killed / name).stat().st_mtime_ns for name in finished} == finished
    (killed / ".journal").unlink()
    assert digest(killed) == digest(tmp_path / "whole")


def test_finished_conversion_is_not_repeated(llama_path: Path, tmp_path: Path) -> None:
    report = convert(llama_path, tmp_path / "engine")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "engine").iterdir()}
    assert convert(llama_path, tmp_path / "engine") == report
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "engine").iterdir()} == before


def test_full_disk_leaves_no_half_shard(llama_path: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))  # the nearest that an ordinary user can make
    try:
        with pytest.raises(OSError, match="too large"):
            convert(llama_path, tmp_path / "engine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "engine").glob("*.safetensors"))


PEAK = """
import re, sys
from pathlib import Path
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.workspace import FolderWorkspace

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def run(name):
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    folder = CheckpointFolder.open(Path(sys.argv[1]) / name)
    workspace = FolderWorkspace(Path(sys.argv[1]) / (name + "-engine"))
    convert_checkpoint(folder, workspace, dtype="float16", overflow="refuse")
    return peak()

run("small")
print(run("small2"), run("large"))
"""


def test_memory_is_flat(tmp_path: Path) -> None:
    """A checkpoint of 160 MB, 80 MB of them one tensor, against one of 2 MB: the same peak."""
    fixtures.llama(tmp_path / "small")
    shutil.copytree(tmp_path / "small", tmp_path / "small2")
    fixtures.llama(tmp_path / "large", vocab_size=320_000, num_hidden_layers=1, shards=1)
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env={"OMP_NUM_THREADS": "1"}).stdout
    small, large = (float(x) for x in output.split())
    assert large - small < 16


class Recorder:
    def __init__(self) -> None:
        self.totals: list[tuple[float, str]] = []
        self.done = 0.0
        self.notes: list[str] = []

    def start(self, item: str, total: float, unit: str) -> None:
        self.totals.append((total, unit))

    def advance(self, amount: float) -> None:
        self.done += amount

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_progress_counts_the_sources_bytes_also_when_resumed(llama_path: Path, tmp_path: Path) -> None:
    folder = CheckpointFolder.open(llama_path)
    total = sum(info.nbytes for info in folder.tensors.values())
    options: dict[str, Any] = {"dtype": "float32", "overflow": "refuse", "max_shard": 400_000}
    with pytest.raises(Killed):
        convert_checkpoint(folder, DyingWorkspace(tmp_path / "engine"), **options)
    recorder = Recorder()
    convert_checkpoint(folder, FolderWorkspace(tmp_path / "engine"), progress=recorder, **options)
    assert recorder.totals == [(total, "B")]
    assert recorder.done == total
    assert recorder.notes == ["weights are written as float32; config.json says bfloat16"]
