"""The compatibility rules as a table: what model, target and settings cannot do together, why, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config import format_rules
from pipeline.config.case import STATIC_ROPES, Case
from pipeline.config.expert_rules import find_unfit_experts
from pipeline.config.gpus import supported_sms
from pipeline.errors import CompatibilityError


@dataclass(frozen=True, slots=True)
class Rule:
    """`find` returns what is wrong, or None; `key` is the setting to look at, or finds it; `way_out` what to do."""

    name: str
    key: str | Callable[[Case], str]
    find: Callable[[Case], str | None]
    way_out: str

    def locate(self, case: Case) -> str:
        """The setting to look at, with its file and line."""
        return case.config.locate(self.key if isinstance(self.key, str) else self.key(case))


def _find_unsupported_sm(case: Case) -> str | None:
    gpu, backend = case.gpu, case.config.target.backend
    if backend in gpu.backends:
        return None
    known = ", ".join(f"SM{sm}" for sm in supported_sms(backend))
    return f"{backend} builds no engines for the {gpu.name} (SM{gpu.sm}); it builds for {known}"


def _find_long_sequences(case: Case) -> str | None:
    limit, wanted, rope = case.context_limit, case.build.max_seq_len, case.architecture.rope
    if wanted <= limit:
        return None
    if rope.kind not in STATIC_ROPES:
        return (
            f"{wanted} tokens are beyond the original context of {limit}; there {rope.kind} RoPE changes its base with "
            "each sequence's length, and an engine holds one table"
        )
    return f"{wanted} tokens are more than the model's context of {limit}"


# Pieces of text: the rule's name, the setting that says how long they are, and what it says.
_PIECES: tuple[tuple[str, str, Callable[[Case], int]], ...] = (
    (
        "calibration_within_context",
        "stages.quantize.calibration.length",
        lambda case: case.quantize.calibration.length if case.quantize.measures else 0,
    ),
    ("heldout_within_context", "stages.verify.heldout.window", lambda case: case.config.stages.verify.heldout.window),
    (
        "drift_within_context",
        "stages.verify.context.lengths",
        lambda case: max(case.config.stages.verify.context.lengths, default=0),
    ),
)


def _make_text_rule(name: str, key: str, measure: Callable[[Case], int]) -> Rule:
    def find(case: Case) -> str | None:
        if (n := measure(case)) <= case.context_limit:
            return None
        return f"{key.removeprefix('stages.')} {n} is more than the model's context of {case.context_limit}"

    return Rule(name, key, find, "shorten the pieces")


_LIMITS = ("max_seq_len", "max_batch_size", "max_num_tokens", "max_blocks", "generation")


def _find_wrong_limits(case: Case) -> str | None:
    """What the engine itself refuses, before there is one."""
    try:
        case.build.limits()
    except CompatibilityError as error:
        told = [case.config.locate(f"stages.build.{key}") for key in _LIMITS if key in error.message]
        places = "".join(f"\n  {text}" for text in told if not text.startswith("stages."))
        return f"{error.message} ({error.hint})" + (f", as set by{places}" if places else "")
    return None


def _find_few_rows(case: Case) -> str | None:
    rows, batch = case.build.max_num_tokens, case.build.max_batch_size
    return f"{rows} rows cannot hold one token of each of {batch} sequences (max_batch_size)" if rows < batch else None


def _find_gathered_context(case: Case) -> str | None:
    build, experts = case.build, case.architecture.experts
    if build.moe != "gather" or experts is None or build.max_num_tokens <= build.max_batch_size:
        return None
    return (
        f"gather copies {experts.top_k} experts' weights for every row, and a context step has up to "
        f"{build.max_num_tokens} rows (max_num_tokens)"
    )


def _find_payload_without_plugin(case: Case) -> str | None:
    build = case.build
    if build.expert_payload == "model" or build.lowering.moe_all_to_all == "plugin":
        return None
    return f"rows are sent to experts as {build.expert_payload} by the plugin moe_all_to_all only"


RULES: tuple[Rule, ...] = (
    Rule("sm_of_backend", "target.gpu", _find_unsupported_sm, "use backend: tensorrt on a host with that GPU"),
    Rule(
        "fp8_needs_sm89",
        format_rules.place_fp8,
        format_rules.find_fp8,
        "take a GPU of SM89 or later, or INT4 (method: awq or rtn) or INT8 (int8 or smoothquant)",
    ),
    Rule(
        "fp8_source_needs_sm89",
        "target.gpu",
        format_rules.find_fp8_source,
        "take a GPU of SM89 or later, or set stages.convert.dtype: bfloat16, which multiplies the checkpoint's FP8 "
        "out, or quantize to INT4 or INT8",
    ),
    Rule(
        "w4a8_is_tensorrt_llms",
        format_rules.place_w4a8,
        format_rules.find_foreign_method,
        "use method awq, or target.backend: tensorrt_llm",
    ),
    Rule(
        "turing_has_less",
        "target.gpu",
        format_rules.find_turing,
        "take a GPU of SM80 or later, or method: none and float16 for a model without routed experts",
    ),
    Rule("bf16_needs_sm80", "stages.convert.dtype", format_rules.find_bf16, "set stages.convert.dtype: float16"),
    Rule(
        "exclude_matches",
        "stages.quantize.exclude",
        format_rules.find_unmatched_exclude,
        "names look like transformer.layers.0.mlp.fc",
    ),
    Rule(
        "something_to_quantize",
        "stages.quantize.include",
        format_rules.find_nothing_chosen,
        "name other roles, or set method: none",
    ),
    Rule(
        "group_divides_something",
        "stages.quantize.group_size",
        format_rules.find_no_group,
        "take a smaller group_size, or set method: none",
    ),
    Rule(
        "experts_share_a_format",
        "stages.quantize",
        format_rules.find_split_experts,
        "name all experts of a layer, as in *.layers.3.mlp.experts.*",
    ),
    Rule(
        "cache_goes_with_weights",
        "stages.quantize.kv_cache",
        format_rules.find_lone_cache,
        "name a method, or set kv_cache: none",
    ),
    Rule("fp8_cache_needs_sm89", "stages.quantize.kv_cache", format_rules.find_fp8_cache, "set kv_cache: none or int8"),
    Rule(
        "cache_is_the_plugins",
        "stages.quantize.kv_cache",
        format_rules.find_cache_without_plugins,
        "set stages.build.lowering.rope_paged_kv and paged_attention: plugin, or kv_cache: none",
    ),
    Rule("context_of_model", "stages.build.max_seq_len", _find_long_sequences, "lower max_seq_len"),
    *(_make_text_rule(*row) for row in _PIECES),
    Rule(
        "limits_agree",
        "stages.build",
        _find_wrong_limits,
        "profiles lie within max_batch_size and max_seq_len, one of them reaches the latter, the pool holds a sequence",
    ),
    Rule(
        "rows_hold_batch",
        "stages.build.max_num_tokens",
        _find_few_rows,
        "raise max_num_tokens to max_batch_size or more",
    ),
    Rule(
        "experts_have_kernels",
        "stages.build.lowering.moe_experts",
        find_unfit_experts,
        "set stages.build.lowering.moe_experts: native, or quantize experts to INT4 or FP8",
    ),
    Rule(
        "gather_is_for_generation",
        "stages.build.moe",
        _find_gathered_context,
        "use moe: dense, or lower max_num_tokens to max_batch_size",
    ),
    Rule(
        "payload_of_plugin",
        "stages.build.expert_payload",
        _find_payload_without_plugin,
        "set stages.build.lowering.moe_all_to_all: plugin, or expert_payload: model",
    ),
)
