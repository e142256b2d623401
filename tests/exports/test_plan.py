"""Damaged and strange engine checkpoints: refused by name before anything is written, whatever the format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import CheckpointError, CompatibilityError, ConfigError
from pipeline.exports.formats import NAMES, export_checkpoint
from tests.exports import support

PROJ = "transformer.layers.1.mlp.proj"
Tensors = dict[str, torch.Tensor]


def drop_scales(tensors: Tensors) -> None:
    del tensors[f"{PROJ}.weights_scaling_factor"]


def cut_scales(tensors: Tensors) -> None:
    tensors[f"{PROJ}.weights_scaling_factor"] = tensors[f"{PROJ}.weights_scaling_factor"][:, :3].clone()


def cut_weight(tensors: Tensors) -> None:
    tensors[f"{PROJ}.weight"] = tensors[f"{PROJ}.weight"][:-1].clone()


def add_vector(tensors: Tensors) -> None:
    tensors[f"{PROJ}.prequant_scaling_factor"] = torch.ones(3)


def drop_norm(tensors: Tensors) -> None:
    del tensors["transformer.layers.0.post_layernorm.weight"]


def add_stranger(tensors: Tensors) -> None:
    tensors["transformer.layers.0.attention.rotary.table"] = torch.ones(3)


def cut_norm(tensors: Tensors) -> None:
    tensors["transformer.ln_f.weight"] = torch.ones(7, dtype=torch.bfloat16)


ATTACKS: list[tuple[Callable[[Tensors], None], str]] = [
    (drop_scales, f"{PROJ}.weight is I8"),
    (cut_scales, f"{PROJ}.weights_scaling_factor is F32[128, 3]"),
    (cut_weight, f"{PROJ}.weight is I8[63, 256]; a weight [128, 256] in int4 goes with [64, 256]"),
    (add_vector, f"{PROJ}.prequant_scaling_factor is F32[3]"),
    (drop_norm, "the engine checkpoint lacks transformer.layers.0.post_layernorm.weight"),
    (add_stranger, "transformer.layers.0.attention.rotary.table has no place in LlamaForCausalLM"),
    (cut_norm, "transformer.ln_f.weight is BF16[7]; without scales it must be plain floats [128]"),
]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    return support.quantize("llama", "rtn", tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize(("damage", "problem"), ATTACKS, ids=lambda each: getattr(each, "__name__", ""))
def test_damage_is_named_and_nothing_left(
    damage: Callable[[Tensors], None], problem: str, quantized: CheckpointFolder, tmp_path: Path
) -> None:
    engine = support.damage(quantized, damage, tmp_path / "damaged")
    for format in NAMES:
        with pytest.raises(CheckpointError, match=re.escape(problem)):
            export_checkpoint(engine, tmp_path / format, format, others="16bit")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_an_error_while_writing_leaves_nothing(quantized: CheckpointFolder, tmp_path: Path) -> None:
    class Full:
        def start(self, item: str, total: float, unit: str) -> None:
            pass

        def advance(self, amount: float) -> None:
            raise OSError(28, "No space left on device")

        def note(self, message: str) -> None:
            pass

    for format in NAMES:
        with pytest.raises(OSError, match="No space left"):
            export_checkpoint(quantized, tmp_path / format, format, progress=Full())
    assert not list(tmp_path.iterdir())


def test_scales_of_the_cache_are_left_out_and_said(quantized: CheckpointFolder, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["transformer.layers.1.attention.kv_cache_scaling_factor"] = torch.ones(1)

    engine = support.damage(quantized, add, tmp_path / "damaged")
    report = export_checkpoint(engine, tmp_path / "out", "awq")
    assert report.notes == ["1 tensors left out, transformer.layers.1.attention.kv_cache_scaling_factor among them"]


def test_formats_are_named(quantized: CheckpointFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'exl2' is no export format") as caught:
        export_checkpoint(quantized, tmp_path / "out", "exl2")
    assert all(name in caught.value.hint for name in NAMES)
    with pytest.raises(ConfigError, match="neither refuse nor 16bit"):
        export_checkpoint(quantized, tmp_path / "out", "awq", others="drop")


def test_a_refusal_says_how_to_go_on(tmp_path: Path) -> None:
    engine = support.quantize("llama", "awq", tmp_path)
    with pytest.raises(CompatibilityError) as caught:
        export_checkpoint(engine, tmp_path / "out", "gguf")
    assert "--others 16bit" in caught.value.hint
    assert "gptq or rtn" in caught.value.message


def test_the_report_is_kept(tmp_path: Path) -> None:
    engine = support.quantize("llama", "awq", tmp_path)
    report = export_checkpoint(engine, tmp_path / "out", "gguf", others="16bit")
    kept = json.loads((tmp_path / "out/export.json").read_text())
    assert kept["format"] == "gguf"
    assert kept["quantized"] == report.quantized == {"int4": 12}
    assert kept["widened"].keys() == {f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)}


@pytest.mark.parametrize("format", ["awq", "modelopt"])
def test_a_quantized_head_is_refused_or_wide(format: str, tmp_path: Path) -> None:
    engine = support.quantize("llama", "rtn", tmp_path, dtype="float16", recipe={"lm_head": "rtn"})
    with pytest.raises(CompatibilityError, match=f"lm_head cannot be exported as {format}: readers"):
        export_checkpoint(engine, tmp_path / "out", format)
    report = export_checkpoint(engine, tmp_path / "out", format, others="16bit")
    assert report.widened.keys() == {"lm_head"}
    assert support.load_folder(tmp_path / "out")["lm_head.weight"].dtype == torch.float16
