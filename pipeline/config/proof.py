"""The settings of the verify stage: the texts and tasks that quantization is judged by, and the bounds that stop it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.section import FilePath, Positive, Ratio, Section


class HeldOut(Section):
    """Text that quantization never saw."""

    files: tuple[FilePath, ...] = Field(
        default=(Path("checkpoints/text/heldout.txt"),), min_length=1, description="Plain text files, UTF-8."
    )
    tokens: Positive = Field(default=8192, description="How many tokens are scored.")
    window: Annotated[int, Field(ge=2)] = Field(default=256, description="Tokens per independently scored piece.")


class Context(Section):
    """Long texts, on which drift is measured: how entropy and KL divergence change with the distance from the start."""

    lengths: tuple[Annotated[int, Field(ge=2, le=2**31 - 1)], ...] = Field(
        default=(),
        description="Context lengths in tokens; figures are of the positions between each and the one before. Empty: "
        "not measured.",
    )
    texts: Positive = Field(default=1, description="How many texts of the longest length are read.")


class Continuations(Section):
    """The worst prompts side by side in the report: what original and quantized go on to say."""

    prompts: Annotated[int, Field(ge=0, le=64)] = Field(
        default=4, description="How many, taken where KL divergence on the held-out text is largest; 0: none."
    )
    tokens: Annotated[int, Field(ge=1, le=1024)] = Field(default=32, description="Tokens generated for each.")


class Gates(Section):
    """Bounds that stop the pipeline. null turns a gate off; it is then reported as skipped, never as passed."""

    conversion: Literal["exact", "off"] = Field(
        default="exact",
        description="Converted weights mapped back must equal the source's, bit for bit in the same type.",
    )
    network_exact: Ratio | None = Field(
        default=1e-4, description="Largest |logit difference| of the network in fp32 against transformers in fp32."
    )
    network_declared: Ratio | None = Field(
        default=None,
        description="Median position's RMS logit error in the declared types, relative to exact arithmetic; null takes "
        "the bound derived from the types.",
    )
    network_cache: Ratio | None = Field(
        default=None,
        description="Median position's RMS logit difference that a quantized KV cache makes, relative; null takes the "
        "bound derived from its type, which scales of half their size exceed: they cut values off. What sound rounding "
        "costs, perplexity and KL judge.",
    )
    network_payload: Ratio | None = Field(
        default=None,
        description="Median position's RMS logit difference that rows sent to experts in FP8 make, relative; null "
        "takes the bound derived from the type.",
    )
    perplexity_ratio: Ratio | None = Field(default=1.05, description="Perplexity of quantized over original, at most.")
    top1_agreement: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=0.9, description="Share of held-out positions with the same most likely token, at least."
    )
    mean_kl: Ratio | None = Field(
        default=0.05,
        description="Mean KL divergence (nats) from original to quantized, at most.",
    )
    top5_overlap: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Mean share of the five most likely tokens that stay among them, at least."
    )
    layer_error: Ratio | None = Field(
        default=None, description="Relative RMS error of the hidden states after the worst layer, at most."
    )
    context_kl: Ratio | None = Field(
        default=None, description="Mean KL divergence (nats) at each of verify.context.lengths, at most."
    )
    context_entropy: Ratio | None = Field(
        default=None,
        description="Change of the output entropy (nats), up or down, at each of verify.context.lengths, at most.",
    )
    accuracy_drop: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Share of verify.tasks solved by the original less that by the quantized, at most."
    )


class Verify(Section):
    """The proof that what is built computes what the checkpoint says, and what quantization cost."""

    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(
            "def quicksort(",
            "The interpreter reads a statement, evaluates it and",
            "import os\nimport sys\n\n\ndef main() -> int:\n    parser = argparse.ArgumentParser(description=",
            "A tensor is",
        ),
        min_length=2,
        description="Prompts of unequal length for the comparison with transformers, run together as one batch.",
    )
    prefill_chunk: Positive = Field(
        default=7,
        description="Tokens per prefill step: prompts are fed in chunks of this size.",
    )
    decode_tokens: Positive = Field(default=6, description="Tokens decoded one at a time after each prompt.")
    router_margin: Annotated[float, Field(ge=0, le=1e-3)] = Field(
        default=1e-5, description="Positions whose expert choice is closer than this are counted and left out."
    )
    heldout: HeldOut = Field(default=HeldOut(), description="What perplexity, agreement and KL are measured on.")
    context: Context = Field(default=Context(), description="Long texts, for drift.")
    tasks: tuple[FilePath, ...] = Field(
        default=(),
        description='JSONL files of tasks, one a line: {"prompt": …, "choices": [… , …], "answer": 0} for choices, '
        '{"prompt": …, "answer": "…"} for exact match. Empty: not measured.',
    )
    continuations: Continuations = Field(default=Continuations(), description="Worst prompts in the report.")
    baseline: bool = Field(
        default=True,
        description="Also measure rounding to nearest in the same formats on the held-out text, for half as much time "
        "again: the report then says what the method's loss is of it.",
    )
    gates: Gates = Field(default=Gates(), description="Bounds that stop the pipeline.")

    @model_validator(mode="after")
    def _refuse_unmeasured(self) -> Self:
        """A bound on what is not measured would neither pass nor fail."""
        for gate, key, measured in (
            ("context_kl", "context.lengths", self.context.lengths),
            ("context_entropy", "context.lengths", self.context.lengths),
            ("accuracy_drop", "tasks", self.tasks),
        ):
            if getattr(self.gates, gate) is not None and not measured:
                raise ValueError(f"gates.{gate} is set, but {key} is empty: nothing of it is measured")
        return self
