"""What TensorRT-LLM 1.2's engine backend cannot run, and what can: asked before any work, by the config's rules, and
again of the checkpoint that is at hand. Light and without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pipeline.engine.tensorrt_llm.ask import Ask, StoredLinear
from pipeline.engine.tensorrt_llm.mixed_gemm import DATACENTER_BLACKWELL
from pipeline.engine.tensorrt_llm.rank_sizes import repeat_heads, share_out
from pipeline.errors import CompatibilityError
from pipeline.sharding.divisions import divisions, tell_undivided

OTHER_BACKENDS = "backend tensorrt_rtx or tensorrt builds trtseek's own network of it; llmapi loads it in PyTorch"
ROUTED = "DeepseekForCausalLM"  # DeepSeek-MoE-16B
RUN = ("LlamaForCausalLM", "Qwen2ForCausalLM", ROUTED)
INTEGERS = ("int4", "int4_fp8", "int8", "int8_sq")
GROUPED = ("int4", "int4_fp8")
GROUP_SIZES = (64, 128)
NO_INTEGERS = "TensorRT-LLM's builder refuses from SM100 to SM119"
W4A8_SMS = range(89, 100)


@dataclass(frozen=True, slots=True)
class Limit:
    """`find` says what is wrong, or None; `key` is the setting to look at, `way_out` what to do."""

    name: str
    key: str
    find: Callable[[Ask], str | None]
    way_out: str


def _find_architecture(ask: Ask) -> str | None:
    a = ask.architecture
    if a.name == "DeepseekV3ForCausalLM":
        return f"TensorRT-LLM's engine backend has no class for {a.name}, in no release"
    if a.latent is not None:
        return (
            f"multi-head latent attention ({a.name}): every 1.x of TensorRT-LLM's engine backend asks for a tensor "
            "(fused_q_proj) that its own layer no longer has"
        )
    if a.name not in RUN:
        return f"{a.name} is not among what rank checkpoints are written for: {', '.join(RUN)}"
    return None


def _find_routing(ask: Ask) -> str | None:
    experts = ask.architecture.experts
    if ask.architecture.name != ROUTED:
        return None
    if experts is None:
        return "TensorRT-LLM routes every layer but the first, and this model has no experts"
    wrong = [
        text
        for text, holds in (
            (f"first_k_dense_replace {experts.first_dense_layers}", experts.first_dense_layers == 1),
            (f"moe_layer_freq {experts.layer_freq}", experts.layer_freq == 1),
            ("norm_topk_prob true", not experts.norm_topk_prob),
            ("no shared experts", experts.num_shared > 0),
        )
        if not holds
    ]
    if not wrong:
        return None
    return f"{wrong[0]}: its {ROUTED} has one dense layer, then shared and routed ones with plain softmax weights"


def _find_experts_format(ask: Ask) -> str | None:
    if ask.architecture.experts is None:
        return None
    found = next((linear for linear in ask.linears if linear.format not in (None, "fp8")), None)
    if found is None:
        return None
    return f"{found.name} is {found.format}: its MoE models take 16 bits and FP8 (integers: TypeError in SharedMoE)"


def _find_split_mlp(ask: Ask) -> str | None:
    """Routed and shared experts are one module."""
    seen: dict[int, StoredLinear] = {}
    for linear in ask.linears:
        layer, name = linear.place
        if ask.architecture.is_routed(layer) and name.startswith("mlp."):
            other = seen.setdefault(layer, linear)
            if other.format != linear.format:
                return f"{linear.name} is {linear.format} and {other.name} {other.format}: they are one module of its"
    return None


def _find_expert_parallel(ask: Ask) -> str | None:
    if ask.formats and ask.parallel.expert > 1:
        return (
            f"expert parallel size {ask.parallel.expert} with quantized weights: its quantization wants moe_ep_size 1"
        )
    return None


def _find_format(ask: Ask, name: str, what: str) -> str | None:
    found = next((linear for linear in ask.linears if linear.format == name), None)
    return f"{found.name} is FP8 {what}" if found else None


def _find_head(ask: Ask) -> str | None:
    return f"lm_head is {ask.head}: its exclude_modules has lm_head always, which stays 16-bit" if ask.head else None


def _find_blackwell(ask: Ask) -> str | None:
    found = sorted(ask.formats & {*INTEGERS})
    if not found or ask.sm not in DATACENTER_BLACKWELL:
        return None
    return f"{', '.join(found)} on SM{ask.sm}: INT8 and INT4 are what {NO_INTEGERS}"


def _find_w4a8(ask: Ask) -> str | None:
    if "int4_fp8" not in ask.formats or ask.sm in W4A8_SMS:
        return None
    return f"W4A8_AWQ on SM{ask.sm}: its kernels are Ada's and Hopper's"


def _find_float32(ask: Ask) -> str | None:
    return "weights in float32: its attention and its GEMMs are for 16 bits" if ask.dtype == "float32" else None


def _find_group(ask: Ask) -> str | None:
    found = next((x for x in ask.linears if x.format in GROUPED and x.group not in GROUP_SIZES), None)
    return f"{found.name} is INT4 in groups of {found.group}: its kernels have 64 and 128" if found else None


def _find_multiple(ask: Ask) -> str | None:
    size, a = ask.parallel.tensor, ask.architecture
    repeated = 2 * (repeat_heads(a, ask.parallel).num_kv_heads - a.num_kv_heads) * a.head_dim
    for linear in ask.linears:
        wanted = linear.multiple * size
        outputs = linear.out_features + (repeated if linear.name.endswith("attention.qkv") else 0)
        for count, what in ((linear.in_features, "inputs"), (outputs, "outputs")):
            if wanted > size and count % wanted:
                return (
                    f"{linear.name} ({linear.format}) has {count} {what}, no multiple of {linear.multiple} x tensor "
                    f"parallel size {size}"
                )
    return None


def _find_undivided(ask: Ask) -> str | None:
    shaped = share_out(ask.architecture, ask.parallel)
    return tell_undivided(ask.parallel, divisions(shaped))


def _find_mixed_integers(ask: Ask) -> str | None:
    if "int8" in ask.formats and len(ask.formats) > 1:
        others = ", ".join(sorted(ask.formats - {"int8"}))
        return f"INT8 weights (method int8) beside {others}: its mixed precision has no such"
    return None


def _find_uneven_stages(ask: Ask) -> str | None:
    """Names in its config.json and quant_cfg.json count a pipeline stage's layers from 0, and one file is for all."""
    stages, layers = ask.parallel.pipeline, ask.architecture.num_layers
    if layers % stages:
        return f"pipeline parallel size {stages} does not divide the model's {layers} decoder layers"
    seen: dict[tuple[int, str], StoredLinear] = {}
    for linear in ask.linears:
        layer, name = linear.place
        local = layer % (layers // stages)
        other = seen.setdefault((local, name), linear)
        if (other.format, other.group) != (linear.format, linear.group):
            return (
                f"{linear.name} is {linear.format or 'not quantized'} and {other.name} is "
                f"{other.format or 'not quantized'}: both are layer {local} of their pipeline stage, and its "
                "settings name layers so"
            )
    return None


LIMITS: tuple[Limit, ...] = (
    Limit("runs_architecture", "target.backend", _find_architecture, OTHER_BACKENDS),
    Limit("runs_routing", "target.backend", _find_routing, OTHER_BACKENDS),
    Limit(
        "runs_experts",
        "stages.quantize.method",
        _find_experts_format,
        f"use method fp8 or none; for INT4 experts {OTHER_BACKENDS}",
    ),
    Limit("runs_moe_whole", "stages.quantize", _find_split_mlp, "quantize a layer's experts and shared expert alike"),
    Limit("runs_experts_apart", "target.parallel.expert", _find_expert_parallel, "set target.parallel.expert: 1"),
    Limit(
        "no_fp8_blocks",
        "stages.quantize.method",
        partial(_find_format, name="fp8_blocks", what="in 128 x 128 blocks, which only its PyTorch backend takes"),
        "use method fp8, or backend llmapi, or stages.convert.dtype: bfloat16 for DeepSeek's checkpoints, stored so",
    ),
    Limit(
        "no_fp8_rows",
        "model.path",
        partial(
            _find_format,
            name="fp8_rows",
            what="with a scale for each output, or for q, k and v each: its engines have one",
        ),
        f"use method fp8, whose q, k and v share a scale; {OTHER_BACKENDS}",
    ),
    Limit("head_in_16_bits", "stages.quantize", _find_head, "leave lm_head out of include and recipe"),
    Limit(
        "no_integers_on_blackwell",
        "stages.quantize.method",
        _find_blackwell,
        "use method fp8; or backend tensorrt, which builds INT4 for that GPU",
    ),
    Limit("w4a8_needs_ada", "stages.quantize.method", _find_w4a8, "use method awq, or a GPU of SM89 or SM90"),
    Limit("engines_in_16_bits", "stages.convert.dtype", _find_float32, "set stages.convert.dtype: float16"),
    Limit(
        "group_has_kernels", "stages.quantize.group_size", _find_group, "set group_size: 64 or 128, or use method fp8"
    ),
    Limit(
        "kernels_divide",
        "target.parallel.tensor",
        _find_multiple,
        "take a smaller tensor parallel size or group_size, exclude the linear, or use method fp8",
    ),
    Limit("sizes_divide", "target.parallel.tensor", _find_undivided, "take parallel sizes that divide"),
    Limit("mixed_precision", "stages.quantize", _find_mixed_integers, "use smoothquant or fp8 in its place"),
    Limit(
        "stages_alike",
        "target.parallel.pipeline",
        _find_uneven_stages,
        "take a pipeline size that divides the layers and leaves every stage alike, or 1",
    ),
)


def check_support(ask: Ask) -> None:
    """Raises CompatibilityError: every broken limit's reason and way out."""
    broken = [(limit, problem) for limit in LIMITS if (problem := limit.find(ask))]
    if broken:
        raise CompatibilityError(
            "\n".join(f"TensorRT-LLM cannot run this: {problem}" for _, problem in broken),
            hint="; ".join(dict.fromkeys(limit.way_out for limit, _ in broken)),
        )
