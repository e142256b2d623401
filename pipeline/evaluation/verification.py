"""The verify stage's work: three proofs, their gates, and the summary a person reads.

1. Conversion: the engine checkpoint holds the source's tensors, bit for bit.
2. Network: what is compiled computes what `transformers` computes (on the quantized checkpoint's weights).
3. Quality: what quantization cost, on held-out text, long contexts and tasks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.text import encode_text
from pipeline.evaluation.comparison import Comparison, Plan, compare_subjects
from pipeline.evaluation.conversion_proof import ConversionProof, prove_conversion
from pipeline.evaluation.forward import digest_network
from pipeline.evaluation.gates import Gate
from pipeline.evaluation.judgement import judge_proofs, judge_quality
from pipeline.evaluation.network_findings import NetworkProof
from pipeline.evaluation.network_proof import prove_network
from pipeline.evaluation.numbers import spell_numbers
from pipeline.evaluation.parallel_proof import RankNetworks
from pipeline.evaluation.schedule import make_sequences
from pipeline.evaluation.subject import describe_subject
from pipeline.sharding import Parallel

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.proof import Verify
    from pipeline.network.spec import NetworkSpec
    from pipeline.progress import Progress

WHOLE_NETWORK_LIMIT = 4 << 30  # bytes of fp32 weights up to which the whole network is interpreted at once
SETTINGS = {"files": "stages.verify.heldout.files", "tasks": "stages.verify.tasks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`quality`: original and quantized, None where nothing was quantized. `rank_digests`: of each rank's network, of a
    parallel model."""

    gates: tuple[Gate, ...]
    network_digest: str
    rank_digests: tuple[str, ...]
    conversion: ConversionProof
    network: NetworkProof
    quality: Comparison | None
    sliced: bool

    def to_json(self) -> dict[str, Any]:
        """JSON, in which a number that is not finite is spelled as text: a failed proof has its report, too."""
        record: dict[str, Any] = spell_numbers(self._record())
        return record

    def _record(self) -> dict[str, Any]:
        return {
            "network_digest": self.network_digest,
            "rank_digests": list(self.rank_digests),
            "gates": [gate.to_json() for gate in self.gates],
            "conversion": asdict(self.conversion),
            "network": asdict(self.network) | {"sliced": self.sliced},
            "quality": self.quality.to_json() if self.quality else None,
        }

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
            original, quantized = self.quality.quality
            errors = quantized.layers.error
            lines.append(
                f"quality: {quantized.tally.tokens} tokens, perplexity {original.tally.perplexity:.3f} -> "
                f"{quantized.tally.perplexity:.3f}, original's top token in the best five at "
                f"{quantized.tally.mean('top1_in_top5'):.2%}"
            )
            if baseline := self.quality.baseline:
                lines.append(
                    f"{baseline.label}: perplexity {baseline.tally.perplexity:.3f}, mean KL "
                    f"{baseline.tally.mean('kl'):.3g}; the quantized checkpoint's: {quantized.tally.mean('kl'):.3g}"
                )
        lines += ["", "layer  network vs transformers (max abs)  quantized vs original (relative RMS)"]
        for layer, error in enumerate(proof.layer_errors):
            cost = f"{errors[layer]:.4f}" if errors else "-"
            lines.append(f"{layer:>5}  {error:<38.2e} {cost}")
        return "\n".join(lines) + "\n"


def verify(
    source: CheckpointFolder,
    converted: CheckpointFolder,
    quantized: CheckpointFolder | None,
    spec: NetworkSpec,
    settings: Verify,
    progress: Progress,
    *,
    parallel: Parallel = Parallel(),
    folder: Path | None = None,
) -> Verification:
    """Runs the proofs. `quantized` is None where nothing was; then the converted checkpoint is what is built, for the
    ranks of `parallel`. `folder` is where large activations may go meanwhile."""
    built = quantized or converted
    architecture = built.architecture
    conversion = prove_conversion(source, converted, progress)
    original = describe_subject(converted, "original")
    prompts = [original.begin + encode_text(original.tokenizer, text) for text in settings.prompts]
    sequences = make_sequences(
        prompts, decode_tokens=settings.decode_tokens, architecture=architecture, max_seq_len=spec.max_seq_len
    )
    whole = sum(math.prod(info.shape) * 4 for info in converted.tensors.values()) <= WHOLE_NETWORK_LIMIT
    layers = architecture.num_layers
    ranks = RankNetworks(checkpoint=built, spec=spec, parallel=parallel) if parallel.world > 1 else None
    network = prove_network(
        built,
        built.config,
        architecture,
        spec,
        sequences,
        prefill_chunk=settings.prefill_chunk,
        router_margin=settings.router_margin,
        segments=[(0, layers)] if whole else [(layer, layer + 1) for layer in range(layers)],
        progress=progress,
        ranks=ranks,
    )
    gates = judge_proofs(settings.gates, conversion, network)
    quality = None
    if quantized is not None:
        subjects = [original, describe_subject(quantized, "quantized")]
        quality = compare_subjects(subjects, _plan(settings, spec), progress, folder=folder)
        gates += judge_quality(settings, quality)
    return Verification(
        gates=tuple(gates),
        network_digest=digest_network(built, architecture, spec),
        rank_digests=ranks.digests() if ranks is not None else (),
        conversion=conversion,
        network=network,
        quality=quality,
        sliced=not whole,
    )


def _plan(settings: Verify, spec: NetworkSpec) -> Plan:
    heldout = settings.heldout
    return Plan(
        files=heldout.files,
        tokens=heldout.tokens,
        window=heldout.window,
        longest=spec.max_seq_len,
        lengths=settings.context.lengths,
        texts=settings.context.texts,
        tasks=settings.tasks,
        continuations=settings.continuations.prompts,
        new_tokens=settings.continuations.tokens,
        baseline=settings.baseline,
        settings=SETTINGS,
    )
