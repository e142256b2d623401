"""What AWQ, GPTQ, compressed-tensors and modelopt have quantized enters as it is: the same numbers, the same scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.conversion_report import ConversionReport
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.hub_weights import hf_layer_state, hf_outer_state
from pipeline.errors import CheckpointError
from pipeline.evaluation.conversion_proof import prove_conversion
from pipeline.network.widening import widen_inputs
from pipeline.progress import SILENT
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.checkpoint.foreign import writers
from tests.checkpoint.foreign.cases import CASES, FP8, INT4, write
from tests.network import models
from tests.network.serving import prompts, reference_logits, serve


def convert(
    source: Path, output: Path, *, foreign: str = "exact", dtype: str | None = None
) -> tuple[CheckpointFolder, ConversionReport]:
    workspace = FolderWorkspace(output, journal=output.with_name(f"{output.name}.journal"))
    report = convert_checkpoint(
        CheckpointFolder.open(source), workspace, dtype=dtype, overflow="refuse", foreign=foreign, max_shard=200_000
    )
    return CheckpointFolder.open(output), report


def assert_stands_for(engine: CheckpointFolder, plain: Path) -> None:
    """Every weight, dequantized, is that of the plain model; one in 16 bits is that rounded once."""
    expected = load_file(plain / "model.safetensors")
    found = dict(hf_outer_state(engine, engine.architecture))
    for layer in range(engine.architecture.num_layers):
        found |= {f"model.layers.{layer}.{n}": t for n, t in hf_layer_state(engine, engine.architecture, layer).items()}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_are_held_or_said_not_to_be(name: str, tmp_path: Path) -> None:
    case, path = CASES[name], write(name, tmp_path)
    if case.widened:
        with pytest.raises(CheckpointError, match=f"{case.widened} of {case.widened + sum(n for _, n in case.held)} "):
            convert(path, tmp_path / "exact")
        assert not list((tmp_path / "exact").glob("*.safetensors"))
    engine, report = convert(path, tmp_path / "engine", foreign="dequantize" if case.widened else "exact")
    told = report.foreign
    assert told is not None
    assert (told["held"], len(told["widened"]), told["wide_inputs"]) == (
        dict(case.held),
        case.widened,
        case.wide_inputs,
    )
    assert all(case.reason in reason for reason in told["widened"].values())
    assert_stands_for(engine, path.with_name("quantized-plain"))
    own = engine.config["trtseek"]
    assert "quantization_config" not in engine.config
    quantized = own["quantization"]["quantized"] if case.held else {}
    assert len(quantized) == sum(n for _, n in case.held)
    assert (own["quantization"] is None) == (not case.held)
    proof = prove_conversion(CheckpointFolder.open(path), engine, SILENT)
    assert proof.differing == {}
    assert proof.elements == sum(t.numel() for t in load_file(tmp_path / "quantized-plain/model.safetensors").values())


@pytest.mark.parametrize(
    "name",
    ["awq", "awq-qwen2", "gptq-act-order", "gptq-moe", "modelopt-int4", "modelopt-fp8", "modelopt-moe-fp8",
     "compressed-int8-static", "compressed-fp8-dynamic", "compressed-fp8-blocks"],
)  # fmt: skip
def test_logits_are_those_of_the_dequantized_original(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    engine, _ = convert(path, tmp_path / "engine", foreign="dequantize")
    plain = path.with_name("quantized-plain")
    if CASES[name].widened:  # rounded to 16 bits, which is what the engine has
        writers.edit(plain, lambda tensors: tensors.update({n: t.half().float() for n, t in tensors.items()}))
    source = models.MemorySource({n: engine.read(n) for n in engine.tensors if "kv_cache" not in n})
    model = models.Model(plain, engine.architecture, source)
    program, reference = widen_inputs(model.program()), model.reference()
    sequences = prompts(model.architecture.vocab_size)
    for found, sequence in zip(serve(program, sequences=sequences), sequences, strict=True):
        expected = reference_logits(reference, sequence)
        assert (found["logits"] - expected).abs().max() < 1e-5
        assert expected.std() > 0.5


def test_numbers_and_scales_are_the_sources_own(tmp_path: Path) -> None:
    """Read with the safetensors library, nibble by nibble."""
    path = write("awq", tmp_path)
    engine, _ = convert(path, tmp_path / "engine")
    source = load_file(path / "model.safetensors")
    base, target = "model.layers.1.mlp.down_proj", "transformer.layers.1.mlp.proj"
    words, packed = source[f"{base}.qweight"], engine.read(f"{target}.weight").to_torch().view(torch.uint8)
    for row, column in ((0, 0), (1, 7), (6, 3), (63, 255), (126, 17), (127, 128)):
        nibble = writers.AWQ_ORDER.index(row % 8)
        stored = (int(words[column, row // 8]) >> (4 * nibble)) & 15
        held = (int(packed[row // 2, column]) >> (4 * (row % 2))) & 15
        assert (held ^ 8) == stored  # two's complement of what was counted from 8
    scales = engine.read(f"{target}.weights_scaling_factor").to_torch()
    assert torch.equal(scales, source[f"{base}.scales"].float().T)


def test_static_inputs_and_cache_scales_come_along(tmp_path: Path) -> None:
    engine, report = convert(write("modelopt-fp8", tmp_path), tmp_path / "engine")
    base = "transformer.layers.2."
    assert engine.read(f"{base}attention.qkv.activation_scaling_factor").to_torch().tolist() == pytest.approx([0.01])
    assert engine.read(f"{base}mlp.gate.activation_scaling_factor").to_torch().tolist() == pytest.approx([0.02])
    assert engine.read(f"{base}attention.kv_cache_scaling_factor").to_torch().tolist() == [0.5]  # the larger
    assert engine.tensors[f"{base}attention.qkv.per_channel_scale"].shape == (256,)
    assert engine.config["trtseek"]["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert report.unused == []


def test_float32_scales_of_int4_are_rounded_once_and_told(tmp_path: Path) -> None:
    _, report = convert(write("modelopt-int4", tmp_path), tmp_path / "engine")
    assert report.foreign is not None and 1e-4 < report.foreign["rounded_scales"] < 2**-8


def test_another_type_is_asked_for(tmp_path: Path) -> None:
    """float16 scales in a bfloat16 repository."""
    engine, report = convert(write("awq-bfloat16", tmp_path), tmp_path / "engine", dtype="float16")
    assert report.foreign is not None and report.foreign["held"] == {"int4": 15}
    assert engine.architecture.dtype == "float16"
    assert_stands_for(engine, tmp_path / "quantized-plain")


def test_a_conversion_that_was_killed_ends_in_the_same_bytes(tmp_path: Path) -> None:
    path = write("gptq-moe", tmp_path)
    engine, _ = convert(path, tmp_path / "engine")
    output = tmp_path / "again"

    class KilledError(Exception):
        pass

    class Killed(FolderWorkspace):
        def finish(self, step: str, files: list[Path]) -> None:  # type: ignore[override]
            super().finish(step, files)
            if step.startswith("model-00003"):
                raise KilledError

    with pytest.raises(KilledError):
        convert_checkpoint(
            CheckpointFolder.open(path),
            Killed(output, journal=tmp_path / "again.journal"),
            dtype=None,
            overflow="refuse",
            max_shard=200_000,
        )
    convert(path, output)
    names = sorted(file.name for file in engine.path.iterdir())
    assert names == sorted(file.name for file in output.iterdir())
    assert all((engine.path / name).read_bytes() == (output / name).read_bytes() for name in names)


def test_groups_of_settings_are_told_apart(tmp_path: Path) -> None:
    """compressed-tensors' config_groups: attention in FP8, the rest in INT4, down_proj left out."""
    hub = fixtures.llama(tmp_path / "hub", tokenizer=True)
    int4 = writers.compressed(hub, tmp_path / "int4", {"weights": INT4}, "pack-quantized")
    both = {"weights": FP8, "input_activations": FP8}
    fp8 = writers.compressed(hub, tmp_path / "fp8", both, "float-quantized")
    mixed, plain = tmp_path / "mixed", tmp_path / "mixed-plain"
    for target, sources in ((mixed, (int4, fp8, hub)), (plain, (tmp_path / "int4-plain", tmp_path / "fp8-plain", hub))):
        _mix(target, *sources)
    config = json.loads((int4 / "config.json").read_text())
    groups = {
        "group_0": _group(int4) | {"targets": ["Linear"], "format": "pack-quantized"},
        "group_1": _group(fp8) | {"targets": ["re:.*self_attn.*"], "format": "float-quantized"},
    }
    config["quantization_config"] |= {"config_groups": groups, "format": "mixed-precision"}
    (mixed / "config.json").write_text(json.dumps(config))
    engine, report = convert(mixed, tmp_path / "engine")
    assert report.foreign is not None
    assert report.foreign["held"] == {"fp8": 3, "fp8_rows": 3, "int4": 6}
    assert_stands_for(engine, plain)
    assert engine.config["trtseek"]["quantization"]["quant_algo"] == "MIXED_PRECISION"


def _group(path: Path) -> dict[str, object]:
    groups: dict[str, dict[str, object]] = json.loads((path / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]
    return groups["group_0"]


def _mix(target: Path, mlp: Path, attention: Path, down: Path) -> None:
    """down_proj from the last folder, attention from the one before, all else from the first."""
    target.mkdir()
    tensors = {}
    for folder in (mlp, attention, down):
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                owner = down if "down_proj" in name else attention if "self_attn" in name else mlp
                if owner == folder:
                    tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((mlp / "config.json").read_bytes())
