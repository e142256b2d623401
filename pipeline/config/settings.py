"""The settings of each stage. Defaults are chosen so that a config may leave all of them out; see `schema.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pipeline.config.recipe import Budget, Method, Recipe, Sensitivity, allow_short_forms
from pipeline.config.section import FilePath, Positive, Ratio, Section
from pipeline.config.tensorrt_llm import TensorRTLLM
from pipeline.quantization.catalog import GroupSize
from pipeline.quantization.selection import Role, Rules

if TYPE_CHECKING:
    from pipeline.engine.limits import BuildLimits

Dtype = Literal["float16", "bfloat16", "float32"]


class Convert(Section):
    """Hugging Face checkpoint to engine checkpoint: names, fusions, type."""

    dtype: Dtype | None = Field(default=None, description="Type of the 16/32-bit weights; null keeps the source's.")
    overflow: Literal["refuse", "clip"] = Field(
        default="refuse", description="When a weight exceeds the type's range: stop with its name, or clip and count."
    )
    foreign: Literal["exact", "dequantize"] = Field(
        default="exact",
        description="Of a model that is quantized already (AWQ, GPTQ, compressed-tensors, modelopt), linears that no "
        "format of the engine holds: stop with the first and why, or write them in 16 bits and name them in "
        "conversion.json.",
    )


class TextFile(Section):
    """A file of calibration text; written as a bare path where nothing more is to be said."""

    path: FilePath = Field(description="UTF-8: plain text, or JSON lines.")
    format: Literal["auto", "text", "jsonl", "chat"] = Field(
        default="auto",
        description="text; jsonl: a text per line; chat: a conversation per line, through the model's chat template; "
        "auto: JSON lines by the name .jsonl or .ndjson, chat where the first of them holds messages.",
    )
    key: str | None = Field(
        default=None, min_length=1, description="Entry of each JSON line; null: text, for chat messages."
    )
    weight: Ratio | None = Field(
        default=None,
        description="Share of the samples, in proportion to the other files' (1 where they say none); null in all of "
        "them: every piece of text is as likely.",
    )


def _name_path(value: object) -> object:
    return {"path": value} if isinstance(value, str | Path) else value


def _allow_path(schema: dict[str, Any]) -> None:
    schema["items"] = {"anyOf": [{"type": "string", "format": "path"}, schema["items"]]}


class Calibration(Section):
    """Text whose activations are measured. Take text unlike the held-out text that verify judges by."""

    files: tuple[Annotated[TextFile, BeforeValidator(_name_path)], ...] = Field(
        default=(TextFile(path=Path("checkpoints/text/calibration.txt")),),
        min_length=1,
        description="Paths, or maps that say more: {path: chats.jsonl, format: chat, weight: 2}.",
        json_schema_extra=_allow_path,
    )
    samples: Positive = Field(default=512, description="How many pieces of text.")
    length: int = Field(default=256, ge=2, le=2**31 - 1, description="Tokens per piece, BOS among them.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Which pieces are drawn.")


class Quantize(Section):
    """16-bit weights to INT4 in groups along the input dimension, to FP8 or to INT8."""

    method: Method = Field(
        default="awq",
        description="INT4 weights: awq, activation-aware scale search (arXiv 2306.00978); gptq, rounding that makes "
        "up for its own errors (arXiv 2210.17323); awq_gptq, both; awq_fp8, awq with FP8 inputs, which TensorRT-LLM "
        "alone has; rtn, round to nearest; rtn_clip, the same within each group's best range. fp8: E4M3 weights and "
        "inputs, one static scale each (from SM89 on). fp8_blocks: E4M3 weights in 128 x 128 blocks; saves memory, not "
        "time. int8: weights alone, a scale per output channel. smoothquant: INT8 weights and inputs (arXiv "
        "2211.10438). none: stay 16-bit.",
    )
    kv_cache: Literal["none", "fp8", "int8"] = Field(
        default="none",
        description="Type of the KV cache; each layer's scale is calibrated and stored. TensorRT-LLM's engines have "
        "such a cache, trtseek's own where build.lowering.rope_paged_kv and paged_attention are plugins.",
    )
    group_size: GroupSize = Field(
        default=128,
        description="Weights per scale; a linear that it does not divide takes the next smaller one, reported.",
    )
    include: tuple[Role, ...] = Field(
        default=("experts", "shared_experts", "mlp", "attention_output"),
        description="Roles of the linears that are quantized; router, norms, embedding and MLA's latent never are. "
        "head is lm_head, where it is not the embedding, by int8 or rtn only: by a recipe's row of its own, mostly.",
    )
    exclude: tuple[str, ...] = Field(
        default=(), description="Shell patterns of engine linears that stay 16-bit, e.g. transformer.layers.0.*"
    )
    calibration: Calibration = Field(default=Calibration(), description="What methods measure activations on.")
    unrouted_experts: Literal["round_to_nearest", "error", "share_scale"] = Field(
        default="round_to_nearest",
        description="Experts that calibration gave fewer than 32 tokens: quantize without a search, stop, or take the "
        "layer's.",
    )
    clip: bool = Field(
        default=True, description="awq, gptq: also search each group's range, by its own share of the output error."
    )

    recipe: Recipe = Field(
        default=Recipe(),
        description="Mixed precision: a file of rows, auto (solved for the budget), or rows.",
        json_schema_extra=allow_short_forms,
    )
    budget: Budget | None = Field(default=None, description="What recipe: auto solves for.")
    sensitivity: Sensitivity = Field(default=Sensitivity(), description="How recipe: auto measures.")

    @property
    def rules(self) -> Rules:
        """What becomes of each linear; of recipe: auto, what becomes of it where there is no recipe yet."""
        return Rules(
            method=self.method,
            include=self.include,
            exclude=self.exclude,
            group_size=self.group_size,
            recipe=tuple(row.override for row in self.recipe.rows),
        )

    @property
    def applies(self) -> bool:
        """Whether anything is quantized."""
        return bool(self.rules.methods)

    @property
    def measures(self) -> bool:
        """Whether a method looks at activations, and so at calibration text."""
        return self.rules.measures or (self.applies and (self.kv_cache != "none" or self.recipe.auto))


class GenerationProfile(Section):
    """One optimization profile of the generation phase, one token per sequence and step."""

    batch: Positive = Field(description="Sequences, at most.")
    length: Positive = Field(description="Tokens of context each, at most.")


class Lowerings(Section):
    """How operations that have a plugin are written: both ways compute the same, which `prove` shows."""

    rope_paged_kv: Literal["native", "plugin"] = Field(
        default="native", description="RoPE and the write into the paged KV cache: TensorRT's layers, or one kernel."
    )
    paged_attention: Literal["native", "plugin"] = Field(
        default="native",
        description="Attention: over pages gathered and padded, or over the pool itself, by block table in the kernel.",
    )
    moe_experts: Literal["native", "plugin"] = Field(
        default="native",
        description="Routed experts: as `moe` says, or grouped by expert in kernels that multiply INT4, FP8 and 16-bit "
        "weights as they are stored, only those that rows chose.",
    )
    moe_all_to_all: Literal["native", "plugin"] = Field(
        default="native",
        description="Expert parallelism: equal splits, padded to what a rank may get at most, or rows in their true "
        "numbers, each once per rank, after the counts; the host reads these, so that no CUDA graph is captured.",
    )


class Build(Section):
    """Limits of the engine. Workspace grows with the largest batch x length rectangle, not with the KV cache."""

    block_size: Literal[16, 32, 64, 128, 256] = Field(default=64, description="Tokens per KV cache block.")
    max_seq_len: Positive = Field(default=4096, description="Longest sequence, prompt and answer together, in tokens.")
    max_batch_size: Positive = Field(default=16, description="Sequences in flight, at most.")
    max_num_tokens: Positive = Field(
        default=2048,
        description="Rows of a context phase step over all sequences, at most.",
    )
    generation: tuple[GenerationProfile, ...] = Field(
        default=(), description="Generation phase profiles; empty means one of max_batch_size x max_seq_len."
    )
    max_blocks: Positive | None = Field(
        default=None,
        description="Blocks in the KV pool, at most; null takes what the largest profile fills, and one to pad.",
    )
    moe: Literal["dense", "gather"] = Field(
        default="dense",
        description="Routed experts: all in one batched matmul, or gathered per token (generation only).",
    )
    expert_payload: Literal["model", "fp8"] = Field(
        default="model",
        description="What moe_all_to_all, the plugin, sends rows to experts as: the model's type, or FP8 with a scale "
        "for each row. Results come back in the model's type.",
    )
    lowering: Lowerings = Field(
        default=Lowerings(),
        description="Which operations are plugins. Those that a config leaves out are, where their kernels have passed "
        "on the GPU's SM (plugins/passed.json) and take what the checkpoint holds, and native elsewhere: today "
        "everywhere.",
    )
    weights: Literal["full", "stripped"] = Field(
        default="full",
        description="stripped: an engine without weights, of any size in little memory; `trtseek refit` brings them on "
        "the GPU host.",
    )
    weight_streaming: bool = Field(
        default=False, description="Whether a runner may keep a part of the weights in host memory."
    )
    tensorrt_llm: TensorRTLLM = Field(default=TensorRTLLM(), description="What only backend tensorrt_llm has.")

    @property
    def profiles(self) -> tuple[GenerationProfile, ...]:
        """The generation profiles, with the default resolved."""
        return self.generation or (GenerationProfile(batch=self.max_batch_size, length=self.max_seq_len),)

    @property
    def pool_blocks(self) -> int:
        """`max_blocks`, with the default resolved. Block 0 is reserved for padding."""
        if self.max_blocks is not None:
            return self.max_blocks
        return 1 + max(p.batch * -(-p.length // self.block_size) for p in self.profiles)

    def limits(self) -> BuildLimits:
        """The engine's limits, defaults resolved. Raises CompatibilityError where they contradict each other."""
        from pipeline.engine.limits import BuildLimits, Rectangle

        return BuildLimits(
            max_seq_len=self.max_seq_len,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            generation=tuple(Rectangle(batch=p.batch, length=p.length) for p in self.profiles),
            block_size=self.block_size,
            max_blocks=self.pool_blocks,
        )
