"""Quantized checkpoints of every format that is read, and what becomes of their linears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import fixtures
from tests.checkpoint.foreign import writers

EIGHT = {"num_bits": 8, "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
INT8 = {**EIGHT, "type": "int", "strategy": "channel"}
FP8 = {**EIGHT, "type": "float", "strategy": "tensor"}
TOKEN = {**EIGHT, "strategy": "token", "dynamic": True}
STATIC_INT8 = {**EIGHT, "type": "int", "strategy": "tensor"}
PACKED, INTEGER, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
# Rows of q, k and v that FP8's blocks divide.
WHOLE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
TOGETHER = 5  # linears of a dense layer: qkv, dense, fc, gate, proj


@dataclass(frozen=True)
class Case:
    """`held`: linears by format; `widened`: how many are written in 16 bits, `reason` why; `wide_inputs`: of held ones,
    those whose input the source rounds and we do not."""

    write: Callable[[Path, Path], Path]
    hub: Callable[..., Path] = fixtures.llama
    options: tuple[tuple[str, Any], ...] = ()
    held: tuple[tuple[str, int], ...] = ()
    widened: int = 0
    reason: str = ""
    wide_inputs: int = 0


def _compressed(scheme: dict[str, Any], format: str, **changes: Any) -> Callable[[Path, Path], Path]:
    return lambda hub, path: writers.compressed(hub, path, scheme, format, **changes)


HALF = (("dtype", "float16"),)
ROUTED = TOGETHER + 2 * (2 + 3 + 3 * 16)  # of a DeepSeek-MoE: one dense layer, two with 16 experts
CASES: dict[str, Case] = {
    "awq": Case(lambda h, p: writers.awq(h, p), options=HALF, held=(("int4", 15),)),
    "awq-whole-rows": Case(lambda h, p: writers.awq(h, p, group=0), options=HALF, held=(("int4", 15),)),
    "awq-zero-points": Case(
        lambda h, p: writers.awq(h, p, symmetric=False), options=HALF, widened=15, reason="has zero points"
    ),
    "awq-bfloat16": Case(lambda h, p: writers.awq(h, p), widened=15, reason="float16 scales that are none of bfloat16"),
    "awq-qwen2": Case(lambda h, p: writers.awq(h, p), hub=fixtures.qwen2, options=HALF, held=(("int4", 15),)),
    "gptq": Case(lambda h, p: writers.gptq(h, p, zero_biases=True), options=HALF, held=(("int4", 15),)),
    "gptq-v2": Case(lambda h, p: writers.gptq(h, p, v2=True, group=32), options=HALF, held=(("int4", 15),)),
    "gptq-zero-points": Case(
        lambda h, p: writers.gptq(h, p, symmetric=False), options=HALF, widened=15, reason="has zero points"
    ),
    "gptq-act-order": Case(
        lambda h, p: writers.gptq(h, p, act_order=True), options=HALF, widened=15, reason="groups scattered"
    ),
    "gptq-8-bit-rows": Case(lambda h, p: writers.gptq(h, p, bits=8, group=0), options=HALF, held=(("int8", 15),)),
    "gptq-8-bit-groups": Case(
        lambda h, p: writers.gptq(h, p, bits=8), options=HALF, widened=15, reason="INT8 scales for groups"
    ),
    "gptq-moe": Case(
        lambda h, p: writers.gptq(h, p), hub=fixtures.deepseek_moe, options=HALF, held=(("int4", ROUTED),)
    ),
    "modelopt-int4": Case(lambda h, p: writers.modelopt(h, p, "W4A16_AWQ"), held=(("int4", 15),)),
    "modelopt-int4-apart": Case(
        lambda h, p: writers.modelopt(h, p, "W4A16_AWQ", shared=False, own_file=False),
        held=(("int4", 12),),
        widened=3,
        reason="q_proj and k_proj and v_proj become one linear, and scale its input differently",
    ),
    "modelopt-fp8": Case(lambda h, p: writers.modelopt(h, p, "FP8", cache=True), held=(("fp8", 12), ("fp8_rows", 3))),
    "modelopt-int8": Case(lambda h, p: writers.modelopt(h, p, "W8A8_SQ_PER_CHANNEL"), held=(("int8_sq", 15),)),
    "modelopt-moe-fp8": Case(
        lambda h, p: writers.modelopt(h, p, "FP8"),
        hub=fixtures.deepseek_moe,
        held=(("fp8", ROUTED - 3), ("fp8_rows", 3)),
    ),
    "compressed-int4": Case(_compressed({"weights": INT4}, PACKED), held=(("int4", 15),)),
    "compressed-int4-zero-points": Case(
        _compressed({"weights": {**INT4, "symmetric": False}}, PACKED), widened=15, reason="has zero points"
    ),
    "compressed-int4-channels": Case(
        _compressed({"weights": {**INT4, "strategy": "channel", "group_size": None}}, PACKED), held=(("int4", 15),)
    ),
    "compressed-int4-small-groups": Case(
        _compressed({"weights": {**INT4, "group_size": 16}}, PACKED), widened=15, reason="has groups of 16"
    ),
    "compressed-int8-packed": Case(_compressed({"weights": INT8}, PACKED), held=(("int8", 15),)),
    "compressed-int8-dynamic": Case(
        _compressed({"weights": INT8, "input_activations": {**TOKEN, "type": "int"}}, INTEGER),
        held=(("int8", 15),),
        wide_inputs=15,
    ),
    "compressed-int8-static": Case(
        _compressed({"weights": INT8, "input_activations": STATIC_INT8}, INTEGER), held=(("int8_sq", 15),)
    ),
    "compressed-fp8-static": Case(
        _compressed({"weights": FP8, "input_activations": FP8}, FLOAT), held=(("fp8", 12), ("fp8_rows", 3))
    ),
    "compressed-fp8-rows-static": Case(
        _compressed({"weights": {**FP8, "strategy": "channel"}, "input_activations": FP8}, FLOAT),
        held=(("fp8_rows", 15),),
    ),
    "compressed-fp8-dynamic": Case(
        _compressed(
            {"weights": {**FP8, "strategy": "channel"}, "input_activations": {**TOKEN, "type": "float"}}, FLOAT
        ),
        held=(("fp8_rows", 15),),
        wide_inputs=15,
    ),
    "compressed-fp8-blocks": Case(
        _compressed({"weights": {**FP8, "strategy": "block", "block_structure": [128, 128]}}, FLOAT),
        options=tuple(WHOLE.items()),
        held=(("fp8_blocks", 10),),
    ),
}


def write(name: str, folder: Path) -> Path:
    """The case's folder; beside it, with "-plain" after its name, the model that it stands for in float32."""
    case = CASES[name]
    hub = case.hub(folder / "hub", tokenizer=True, **dict(case.options))
    return case.write(hub, folder / "quantized")
