"""What the proofs say by a config's gates: the record of it, and the summary that a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.evaluation.conversion_proof import ConversionProof
from pipeline.evaluation.gates import Gate
from pipeline.evaluation.judgement import judge_proofs, judge_quality
from pipeline.evaluation.network_findings import NetworkProof
from pipeline.evaluation.numbers import read_numbers, spell_numbers
from pipeline.evaluation.proofs import read_proofs

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config.proof import Gates


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`quality`: a comparison's JSON of original and quantized, None where nothing was quantized. `network_digest`,
    `rank_digests`: of what may be built; of each rank's network, of a parallel model."""

    gates: tuple[Gate, ...]
    network_digest: str
    rank_digests: tuple[str, ...]
    conversion: ConversionProof
    network: NetworkProof
    quality: Mapping[str, Any] | None
    proofs: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """JSON, in which a number that is not finite is spelled as text, as the proofs' files have it."""
        record: dict[str, Any] = {
            "network_digest": self.network_digest,
            "rank_digests": list(self.rank_digests),
            "gates": [spell_numbers(gate.to_json()) for gate in self.gates],
            **self.proofs,
        }
        return record

    def summarize(self) -> str:
        """Plain text: the gates, then one line per layer."""
        proof = self.network
        lines = [gate.describe() for gate in self.gates]
        lines += [
            "",
            f"conversion: {self.conversion.tensors} tensors, {self.conversion.elements} weights compared"
            + (f", {self.conversion.clipped} clipped" if self.conversion.clipped else ""),
            f"network: {proof.positions} positions in {proof.steps} steps ({proof.mixed_steps} mix prompt chunks and "
            f"single tokens), {proof.left_out} left out for a near-tied router",
            f"network digest: {self.network_digest}",
            *(f"network digest of rank {rank}: {digest}" for rank, digest in enumerate(self.rank_digests)),
        ]
        errors = None
        if self.quality:
            original, quantized = self.quality["checkpoints"]
            errors = [row["error"] for row in quantized["layers"]]
            lines.append(
                f"quality: {quantized['tokens']} tokens, perplexity {original['perplexity']:.3f} -> "
                f"{quantized['perplexity']:.3f}, original's top token in the best five at "
                f"{quantized['top1_in_top5']:.2%}"
            )
            if baseline := self.quality["baseline"]:
                lines.append(
                    f"{baseline['label']}: perplexity {baseline['perplexity']:.3f}, mean KL "
                    f"{baseline['mean_kl']:.3g}; the quantized checkpoint's: {quantized['mean_kl']:.3g}"
                )
        lines += ["", "layer  network vs transformers (max abs)  quantized vs original (relative RMS)"]
        for layer, error in enumerate(proof.layer_errors):
            cost = f"{errors[layer]:.4f}" if errors else "-"
            lines.append(f"{layer:>5}  {error:<38.2e} {cost}")
        return "\n".join(lines) + "\n"


def judge(proofs: Path, bounds: Gates) -> Verification:
    """`proofs`: the folder that `prove` wrote."""
    record = read_proofs(proofs)
    digests = {key: record["network"].pop(key) for key in ("network_digest", "rank_digests")}
    conversion = ConversionProof(**record["conversion"])
    network = NetworkProof.from_json(read_numbers(record["network"]))
    quality = record["quality"]
    if quality is not None:  # samples are texts of the model's
        quality = {**quality, **{key: read_numbers(quality[key]) for key in ("checkpoints", "baseline")}}
    gates = judge_proofs(bounds, conversion, network)
    if quality is not None:
        gates += judge_quality(bounds, quality)
    return Verification(
        gates=tuple(gates),
        network_digest=digests["network_digest"],
        rank_digests=tuple(digests["rank_digests"]),
        conversion=conversion,
        network=network,
        quality=quality,
        proofs=record,
    )
