"""The gates of the verify stage: each figure, its bound from the config, and where to look when it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.evaluation.gates import Gate, Relation

if TYPE_CHECKING:
    from pipeline.config.proof import Gates, Verify
    from pipeline.evaluation.comparison import Comparison
    from pipeline.evaluation.conversion_proof import ConversionProof
    from pipeline.evaluation.measurement import Measure
    from pipeline.evaluation.network_findings import NetworkProof


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of what is judged on held-out text: name in the config, value (original, quantized), and what it is."""

    name: str
    value: Callable[[Measure, Measure], float]
    relation: Relation
    meaning: str


FIGURES = (
    Figure(
        name="perplexity_ratio",
        value=lambda original, quantized: quantized.tally.perplexity / original.tally.perplexity,
        relation="<=",
        meaning="perplexity, quantized over original",
    ),
    Figure(
        name="top1_agreement",
        value=lambda _, quantized: quantized.tally.mean("top1"),
        relation=">=",
        meaning="share of positions with the same top token",
    ),
    Figure(
        name="mean_kl",
        value=lambda _, quantized: quantized.tally.mean("kl"),
        relation="<=",
        meaning="mean KL divergence from original to quantized, nats",
    ),
    Figure(
        name="top5_overlap",
        value=lambda _, quantized: quantized.tally.mean("top5"),
        relation=">=",
        meaning="mean share of the five most likely tokens kept",
    ),
    Figure(
        name="layer_error",
        value=lambda _, quantized: quantized.layers.error[quantized.worst_output],
        relation="<=",
        meaning="relative RMS error of the worst layer's output",
    ),
)


def judge_proofs(bounds: Gates, conversion: ConversionProof, network: NetworkProof) -> list[Gate]:
    """Whether what was written is the source's, and what is compiled computes what `transformers` does."""
    differing = conversion.differing
    gates = [
        Gate(
            name="conversion",
            value=len(differing),
            bound=0 if bounds.conversion == "exact" else None,
            relation="<=",
            meaning="source tensors that the engine checkpoint does not reproduce",
            blame=f"first: {min(differing)}" if differing else "",
        ),
        Gate(
            name="network_exact",
            value=network.max_logit_error,
            bound=bounds.network_exact,
            relation="<=",
            meaning="largest |logit difference| against transformers, both fp32",
            blame=f"{network.positions} positions compared; worst layer: {network.worst_layer} "
            f"({network.layer_errors[network.worst_layer]:.2e} in its output)",
        ),
        Gate(
            name="network_declared",
            value=network.declared_error,
            bound=bounds.network_declared or network.declared_bound,
            relation="<=",
            meaning="median relative RMS error of a position's logits in the declared types",
            blame=f"worst layer: {network.worst_declared_layer} "
            f"({network.declared_layer_errors[network.worst_declared_layer]:.2e} in its output)",
        ),
    ]
    rows = []
    if network.native:
        blame = f"plugins: {', '.join(network.native.plugins)}"
        rows += [
            ("network_native", network.native.max_logit_error, "without plugins, against transformers", blame),
            ("lowerings_agree", network.native.max_difference, "with plugins and without", blame),
        ]
    if network.ranks:
        blame = f"{network.ranks.world} ranks"
        rows += [
            ("ranks_exact", network.ranks.max_logit_error, "of all ranks together, against transformers", blame),
            ("ranks_agree", network.ranks.max_difference, "of all ranks together and of one", blame),
        ]
    if network.native_ranks:
        blame = f"{network.native_ranks.world} ranks"
        worst = max(network.native_ranks.max_logit_error, network.native_ranks.max_difference)
        rows.append(("native_ranks", worst, "of all ranks without plugins, against transformers and one rank", blame))
    scales = "transformer.layers.*.attention.kv_cache_scaling_factor of the quantized checkpoint"
    roundings = (
        ("network_cache", network.cache, bounds.network_cache, "cache", scales),
        ("network_payload", network.payload, bounds.network_payload, "rows sent", "stages.build.expert_payload"),
    )
    for name, proof, bound, what, blame in roundings:
        if proof:
            gates.append(
                Gate(
                    name=name,
                    value=proof.error,
                    bound=bound or proof.bound,
                    relation="<=",
                    meaning=f"median relative RMS error of a position's logits by the {proof.kind} {what}",
                    blame=blame,
                )
            )
    gates += [
        Gate(
            name=name,
            value=value,
            bound=bounds.network_exact,
            relation="<=",
            meaning=f"largest |logit difference| {meaning}, both fp32",
            blame=blame,
        )
        for name, value, meaning, blame in rows
    ]
    return gates


def judge_quality(settings: Verify, comparison: Comparison) -> Iterator[Gate]:
    """What quantization cost. A figure that was not measured has no value, and by the config's rules no bound."""
    bounds, (original, quantized) = settings.gates, comparison.quality
    worst = f"worst layer: {quantized.worst_layer}"
    for figure in FIGURES:
        blame = f"layer {quantized.worst_output}" if figure.name == "layer_error" else worst
        yield Gate(
            name=figure.name,
            value=figure.value(original, quantized),
            bound=getattr(bounds, figure.name),
            relation=figure.relation,
            meaning=figure.meaning,
            blame=blame,
        )
    yield from _judge_context(bounds, comparison, worst)
    drop = None
    if comparison.accuracy:
        drop = comparison.accuracy[0].share - comparison.accuracy[1].share
    yield Gate(
        name="accuracy_drop",
        value=drop,
        bound=bounds.accuracy_drop,
        relation="<=",
        meaning="share of tasks solved, original less quantized",
        blame=worst,
    )


def _judge_context(bounds: Gates, comparison: Comparison, blame: str) -> Iterator[Gate]:
    """One gate of each kind per length."""
    rows = list(zip(*comparison.drift, strict=True)) if comparison.drift else [None]
    for kind, meaning in (("kl", "mean KL divergence"), ("entropy", "change of the output entropy")):
        for row in rows:
            name, value = f"context_{kind}", None
            if row is not None:
                original, quantized = row
                name += f"@{original['length']}"
                meaning_here = f"{meaning} up to {original['length']} tokens of context, nats"
                value = quantized["kl"] if kind == "kl" else abs(quantized["entropy"] - original["entropy"])
            else:
                meaning_here = f"{meaning} over long contexts, nats"
            bound = getattr(bounds, f"context_{kind}")
            yield Gate(name=name, value=value, bound=bound, relation="<=", meaning=meaning_here, blame=blame)
