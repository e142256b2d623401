"""The verify stage's work: three proofs, their gates, and the summary a person reads.

1. Conversion: the engine checkpoint holds the source's tensors, bit for bit.
2. Network: what is compiled computes what `transformers` computes (on the quantized checkpoint's weights).
3. Quality: what quantization cost, on held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.text import encode_file, encode_text
from pipeline.evaluation.conversion_proof import ConversionProof, prove_conversion
from pipeline.evaluation.forward import digest_network
from pipeline.evaluation.gates import Gate
from pipeline.evaluation.network_proof import NetworkProof, make_sequences, prove_network
from pipeline.evaluation.quality import Quality, compare, cut_windows

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.schema import Verify
    from pipeline.network.spec import NetworkSpec
    from pipeline.progress import Progress

TOKENIZER = "tokenizer.json"
WHOLE_NETWORK_LIMIT = 4 << 30  # bytes of fp32 weights up to which the whole network is interpreted at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    gates: tuple[Gate, ...]
    network_digest: str
    conversion: ConversionProof
    network: NetworkProof
    quality: Quality | None
    sliced: bool

    def to_json(self) -> dict[str, Any]:
        """JSON, in which a number that is not finite is spelled as text: a failed proof has its report, too."""
        record: dict[str, Any] = _spell_numbers(self._record())
        return record

    def _record(self) -> dict[str, Any]:
        return {
            "network_digest": self.network_digest,
            "gates": [gate.to_json() for gate in self.gates],
            "conversion": asdict(self.conversion),
            "network": asdict(self.network) | {"sliced": self.sliced},
            "quality": self.quality.to_json() if self.quality else None,
        }

    def summarize(self) -> str:
        """Plain text: the gates, then one line per layer."""
        proof, quality = self.network, self.quality
        lines = [gate.describe() for gate in self.gates]
        lines += [
            "",
            f"conversion: {self.conversion.tensors} tensors, {self.conversion.elements} weights compared"
            + (f", {self.conversion.clipped} clipped" if self.conversion.clipped else ""),
            f"network: {proof.positions} positions in {proof.steps} steps ({proof.mixed_steps} mix prompt chunks and "
            f"single tokens), {proof.left_out} left out for a near-tied router",
            f"network digest: {self.network_digest}",
        ]
        if quality:
            lines.append(
                f"quality: {quality.tokens} tokens, perplexity {quality.perplexity_original:.3f} -> "
                f"{quality.perplexity_quantized:.3f}, original's top token in the best five at "
                f"{quality.top5 / quality.tokens:.2%}"
            )
        lines += ["", "layer  network vs transformers (max abs)  quantized vs original (relative RMS)"]
        for layer, error in enumerate(proof.layer_errors):
            cost = f"{quality.layer_error[layer]:.4f}" if quality else "-"
            lines.append(f"{layer:>5}  {error:<38.2e} {cost}")
        return "\n".join(lines) + "\n"


def verify(
    source: CheckpointFolder,
    converted: CheckpointFolder,
    quantized: CheckpointFolder | None,
    spec: NetworkSpec,
    settings: Verify,
    progress: Progress,
) -> Verification:
    """Runs the proofs. `quantized` is None where nothing was; then the converted checkpoint is what is built."""
    built = quantized or converted
    architecture = built.architecture
    conversion = prove_conversion(source, converted, progress)
    prompts = [_begin(source) + encode_text(source.path / TOKENIZER, text) for text in settings.prompts]
    sequences = make_sequences(
        prompts, decode_tokens=settings.decode_tokens, architecture=architecture, max_seq_len=spec.max_seq_len
    )
    whole = sum(math.prod(info.shape) * 4 for info in converted.tensors.values()) <= WHOLE_NETWORK_LIMIT
    layers = architecture.num_layers
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
    )
    quality = _measure_quality(source, converted, quantized, spec, settings, progress) if quantized else None
    return Verification(
        gates=tuple(_judge(settings, conversion, network, quality)),
        network_digest=digest_network(built, architecture, spec),
        conversion=conversion,
        network=network,
        quality=quality,
        sliced=not whole,
    )


def _measure_quality(
    source: CheckpointFolder,
    converted: CheckpointFolder,
    quantized: CheckpointFolder,
    spec: NetworkSpec,
    settings: Verify,
    progress: Progress,
) -> Quality:
    heldout = settings.heldout
    tokenizer = source.path / TOKENIZER
    tokens = [
        token for path in heldout.files for token in encode_file(tokenizer, path, setting="stages.verify.heldout.files")
    ]
    window = min(heldout.window, spec.max_seq_len)
    origin = ", ".join(map(str, heldout.files))
    windows = cut_windows(tokens, total=heldout.tokens, window=window, origin=origin, first=_begin(source))
    return compare(converted, quantized, converted.architecture, spec, windows, progress)


def _judge(
    settings: Verify, conversion: ConversionProof, network: NetworkProof, quality: Quality | None
) -> Sequence[Gate]:
    bounds = settings.gates
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
    if quality:
        worst = f"worst layer: {quality.worst_layer}"
        rows = (
            (
                "perplexity_ratio",
                quality.perplexity_quantized / quality.perplexity_original,
                "<=",
                "perplexity, quantized over original",
            ),
            ("top1_agreement", quality.top1 / quality.tokens, ">=", "share of positions with the same top token"),
            ("mean_kl", quality.kl / quality.tokens, "<=", "mean KL divergence from original to quantized, nats"),
        )
        for name, value, relation, meaning in rows:
            bound = getattr(bounds, name)
            gates.append(
                Gate(name=name, value=value, bound=bound, relation=relation, meaning=meaning, blame=worst)  # type: ignore[arg-type]
            )
    return gates


def _begin(source: CheckpointFolder) -> list[int]:
    """The token that the model's real inputs begin with, as calibration has it."""
    bos = source.config.get("bos_token_id")
    return [bos] if isinstance(bos, int) else []


def _spell_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spell_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spell_numbers(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
