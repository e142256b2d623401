from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.checkpoint.layouts import layout_for
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.engine.memory import Design, plan_memory
from pipeline.engine.weights import estimate_weights
from pipeline.network.spec import Lowering
from pipeline.quantization.selection import Decision, Rules
from pipeline.sharding.ranks import Parallel
from tests.fixtures import LLAMA_CONFIG, V2_CONFIG, V3_CONFIG

# https://huggingface.co/deepseek-ai/deepseek-llm-7b-base
LLM_7B = parse_architecture(
    LLAMA_CONFIG
    | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 30,
        "num_key_value_heads": 32,
        "vocab_size": 102400,
    }
)
# DeepSeek-V3's sizes, in V2's architecture: 61 layers, 256 experts.
V3_SIZES: dict[str, Any] = V2_CONFIG | {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
PLUGINS = Lowering(rope_paged_kv="plugin", paged_attention="plugin")
ROLES = ("experts", "shared_experts", "mlp", "attention_output")


def limits(batch: int, length: int, **changes: Any) -> BuildLimits:
    values: dict[str, Any] = {
        "max_seq_len": length,
        "max_batch_size": batch,
        "max_num_tokens": 1024,
        "generation": (Rectangle(batch=batch, length=length),),
        "max_blocks": batch * math.ceil(length / 64) + 1,
    }
    return BuildLimits(**values | changes)


def group_of(rules: Rules, role: str, shape: tuple[int, ...]) -> int | None:
    decision = rules.decide("a", role, shape)
    return decision.group if isinstance(decision, Decision) else None


def count_bytes(architecture: Architecture, e: int, rules: Rules | None = None, without: str = "") -> int:
    """The weights, tensor by tensor."""
    total = 0
    for mapping in layout_for(architecture).mappings():
        elements = math.prod(mapping.target_shape)
        group = rules and len(mapping.target_shape) == 2 and group_of(rules, mapping.role, mapping.target_shape)
        if mapping.optional:
            continue
        if group and not (without and mapping.target.startswith(without)):
            total += elements // 2 + elements // group * e
        else:
            total += elements * (4 if mapping.role == "router" else e)
    return total


def test_weights_of_a_published_model() -> None:
    """DeepSeek-LLM 7B has 6.91 billion parameters (arXiv 2401.02954 counts 7B; its model card's size, 13.8 GB)."""
    assert round(estimate_weights(LLM_7B, dtype="bfloat16", max_seq_len=1) / 2e9, 2) == 6.91


def test_kinds_of_layers_add_up_to_all_tensors() -> None:
    architecture = parse_architecture(V2_CONFIG | {"num_hidden_layers": 5})
    tables = 256 * 16 * 4
    rules = Rules(method="rtn", include=ROLES, group_size=128)
    assert estimate_weights(architecture, dtype="float16", max_seq_len=256) == count_bytes(architecture, 2) + tables
    assert (
        estimate_weights(architecture, dtype="float16", max_seq_len=256, rules=rules)
        == count_bytes(architecture, 2, rules) + tables
    )
    excluding = Rules(method="rtn", include=ROLES, exclude=("transformer.layers.3.*",), group_size=128)
    assert (
        estimate_weights(architecture, dtype="float16", max_seq_len=256, rules=excluding)
        == count_bytes(architecture, 2, rules, "transformer.layers.3.") + tables
    )


def test_fp8_blocks_take_a_byte_a_weight_and_a_scale_each() -> None:
    architecture = parse_architecture(V3_CONFIG)
    kept = estimate_weights(architecture, dtype="bfloat16", max_seq_len=1, fp8=True)
    total = sum(
        (-(-m.target_shape[0] // 128) * -(-m.target_shape[1] // 128) * (128 * 128 + 4))
        if len(m.target_shape) == 2 and m.role not in ("embedding", "head", "router")
        else m.elements * (4 if m.role == "router" else 2)
        for m in layout_for(architecture).mappings()
        if m.role != "mtp"
    )
    assert kept == total + 16 * 4


def test_the_mtp_layer_takes_no_room_in_an_engine() -> None:
    with_layer, without = (
        estimate_weights(
            parse_architecture(V3_CONFIG | {"num_nextn_predict_layers": n}), dtype="bfloat16", max_seq_len=1
        )
        for n in (1, 0)
    )
    assert with_layer == without


def test_groups() -> None:
    rules = Rules(method="rtn", include=("mlp",), group_size=128)
    assert group_of(rules, "mlp", (8, 256)) == 128
    assert group_of(rules, "mlp", (8, 10944)) == 64  # DeepSeek-V2-Lite's dense layer
    assert group_of(rules, "mlp", (8, 100)) is None
    assert group_of(rules, "mlp", (7, 256)) is None
    assert group_of(rules, "router", (8, 256)) is None
    assert group_of(Rules(method="rtn", include=("mlp",), group_size=32), "mlp", (8, 256)) == 32


def test_kv_cache() -> None:
    plan = plan_memory(Design(LLM_7B, dtype="float16"), limits(4, 4096))
    assert plan.kv_bytes_per_token == 2 * 30 * 32 * 128 * 2  # K and V, layers, heads, head size, bytes
    assert plan.kv_bytes_per_block == 64 * plan.kv_bytes_per_token
    assert plan.pool_bytes == (4 * 64 + 1) * plan.kv_bytes_per_block
    latent = plan_memory(Design(parse_architecture(V3_SIZES), dtype="bfloat16"), limits(4, 4096))
    assert latent.kv_bytes_per_token == 61 * 576 * 2
    for kind in ("int8", "fp8"):
        half = plan_memory(Design(LLM_7B, dtype="float16", lowering=PLUGINS, kv_cache=kind), limits(4, 4096))
        assert (half.kv_bytes_per_token * 2, half.pool_bytes * 2) == (plan.kv_bytes_per_token, plan.pool_bytes)


def test_the_cache_of_stages_is_that_of_the_longest() -> None:
    """61 layers over two stages: the second has 30, and more weights, since three of the first's have no experts."""
    v3 = parse_architecture(V3_SIZES)
    plan = plan_memory(Design(v3, dtype="bfloat16", parallel=Parallel(pipeline=2)), limits(4, 4096))
    assert plan.kv_bytes_per_token == 31 * 576 * 2
    stages = [
        estimate_weights(v3, dtype="bfloat16", max_seq_len=4096, rank=rank) for rank in Parallel(pipeline=2).ranks
    ]
    assert plan.weights_bytes == stages[1] > stages[0]


def test_attention_that_copies_no_pages_takes_less() -> None:
    given = limits(64, 4096)
    native, plugin = (
        plan_memory(Design(LLM_7B, dtype="float16", lowering=lowering), given) for lowering in (Lowering(), PLUGINS)
    )
    pages = 2 * 64 * 4096 * 32 * 128 * 2  # keys and values of one layer
    assert native.workspaces[1][1].nbytes > pages > 20 * plugin.workspaces[1][1].nbytes


def test_needs_no_torch() -> None:
    code = "import sys, pipeline.engine.fit; print('torch' in sys.modules, 'tensorrt_rtx' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["False", "False"]
