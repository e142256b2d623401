"""The gates of the verify stage: each figure, its bound from the config, and where to look when it fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.evaluation.gates import Gate, Relation
from pipeline.evaluation.network_findings import find_largest, find_worst

if TYPE_CHECKING:
    from pipeline.config.proof import Gates
    from pipeline.evaluation.conversion_proof import ConversionProof
    from pipeline.evaluation.network_findings import NetworkProof


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of what is judged on held-out text: the name that config and comparison have for it, and what it is."""

    name: str
    relation: Relation
    meaning: str


FIGURES = (
    Figure(name="perplexity_ratio", relation="<=", meaning="perplexity, quantized over original"),
    Figure(name="top1_agreement", relation=">=", meaning="share of positions with the same top token"),
    Figure(name="mean_kl", relation="<=", meaning="mean KL divergence from original to quantized, nats"),
    Figure(name="top5_overlap", relation=">=", meaning="mean share of the five most likely tokens kept"),
    Figure(name="layer_error", relation="<=", meaning="relative RMS error of the worst layer's output"),
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


def judge_quality(bounds: Gates, quality: Mapping[str, Any]) -> Iterator[Gate]:
    """What quantization cost, by a comparison's JSON of original and quantized. A figure that was not measured has no
    value, and by the config's rules no bound."""
    original, quantized = quality["checkpoints"]
    errors = [row["error"] for row in quantized["layers"]]
    worst, output = f"worst layer: {find_worst(errors)}", find_largest(errors)
    values = {**quantized, "layer_error": errors[output]}
    for figure in FIGURES:
        yield Gate(
            name=figure.name,
            value=values[figure.name],
            bound=getattr(bounds, figure.name),
            relation=figure.relation,
            meaning=figure.meaning,
            blame=f"layer {output}" if figure.name == "layer_error" else worst,
        )
    yield from _judge_context(bounds, original["context"], quantized["context"], worst)
    drop = None
    if original["accuracy"]:
        drop = original["accuracy"]["accuracy"] - quantized["accuracy"]["accuracy"]
    yield Gate(
        name="accuracy_drop",
        value=drop,
        bound=bounds.accuracy_drop,
        relation="<=",
        meaning="share of tasks solved, original less quantized",
        blame=worst,
    )


def _judge_context(
    bounds: Gates, originals: Sequence[Mapping[str, Any]], quantizeds: Sequence[Mapping[str, Any]], blame: str
) -> Iterator[Gate]:
    """One gate of each kind per length; one that nothing measures where there are none."""
    pairs = [*zip(originals, quantizeds, strict=True)]
    for kind, meaning in (("kl", "mean KL divergence"), ("entropy", "change of the output entropy")):
        found = [
            (
                f"context_{kind}@{original['length']}",
                quantized["kl"] if kind == "kl" else abs(quantized["entropy"] - original["entropy"]),
                f"up to {original['length']} tokens of context",
            )
            for original, quantized in pairs
        ]
        for name, value, where in found or [(f"context_{kind}", None, "over long contexts")]:
            bound = getattr(bounds, f"context_{kind}")
            yield Gate(
                name=name, value=value, bound=bound, relation="<=", meaning=f"{meaning} {where}, nats", blame=blame
            )
