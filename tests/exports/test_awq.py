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
from transformers.quantizers.quantizers_utils import should_convert_module

from pipeline.errors import CompatibilityError
from pipeline.exports.formats import export_checkpoint
from pipeline.quantization.int4_asymmetric import quantize_asymmetric
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


def test_zero_points_where_they_are_asked_for(tmp_path: Path) -> None:
    engine = support.convert("llama", tmp_path)
    report = export_checkpoint(engine, tmp_path / "out", "awq", asymmetric=64)
    assert report.quantized == {"int4_zeros": 14}
    assert report.notes == ["14 linears rounded to INT4 with zero points, which was not proved"]
    dense = decode(support.load_folder(tmp_path / "out"), 64)
    source = support.load_folder(tmp_path / "hf")
    assert dense.keys() == source.keys()
    for name, weight in source.items():
        if weight.ndim == 2 and "layers" in name:
            rounded = quantize_asymmetric(weight, 64, scale_dtype=torch.float16)
            assert torch.equal(dense[name], rounded.dequantize())
            assert len(set(rounded.zeros.flatten().tolist())) > 3
        else:
            assert torch.equal(dense[name], weight)


def test_nothing_is_rounded_twice(tmp_path: Path) -> None:
    engine = support.quantize("llama", "rtn", tmp_path)
    with pytest.raises(CompatibilityError, match=r"attention\.qkv\.weight is int4 already"):
        export_checkpoint(engine, tmp_path / "out", "awq", asymmetric=64)


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


def test_a_quantized_head_is_refused_or_wide(tmp_path: Path) -> None:
    engine = support.quantize("llama", "rtn", tmp_path, dtype="float16", recipe={"lm_head": "rtn"})
    with pytest.raises(CompatibilityError, match="lm_head cannot be exported as awq: readers"):
        export_checkpoint(engine, tmp_path / "out", "awq")
    report = export_checkpoint(engine, tmp_path / "out", "awq", others="16bit")
    assert report.widened.keys() == {"lm_head"}
    assert support.load_folder(tmp_path / "out")["lm_head.weight"].dtype == torch.float16
