"""The proofs of a run, whose JSON the verify stage judges: what each measures knows no bound.

1. Conversion: the engine checkpoint holds the source's tensors, bit for bit.
2. Network: what is compiled computes what `transformers` computes (on the quantized checkpoint's weights).
3. Quality: what quantization cost, on held-out text, long contexts and tasks.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.text import encode_text
from pipeline.evaluation.comparison import Plan, compare_subjects
from pipeline.evaluation.conversion_proof import prove_conversion
from pipeline.evaluation.forward import digest_network
from pipeline.evaluation.network_proof import prove_network
from pipeline.evaluation.numbers import spell_numbers
from pipeline.evaluation.parallel_proof import RankNetworks
from pipeline.evaluation.schedule import make_sequences
from pipeline.evaluation.subject import describe_subject
from pipeline.sharding import Parallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.proof import Verify
    from pipeline.network.spec import NetworkSpec
    from pipeline.progress import Progress
    from pipeline.workspace import Workspace

CONVERSION, NETWORK, QUALITY = "conversion.json", "network.json", "quality.json"
WHOLE_NETWORK_LIMIT = 4 << 30  # bytes of fp32 weights up to which the whole network is interpreted at once
SETTINGS = {"files": "stages.verify.heldout.files", "tasks": "stages.verify.tasks"}


def prove(
    source: CheckpointFolder,
    converted: CheckpointFolder,
    quantized: CheckpointFolder | None,
    spec: NetworkSpec,
    settings: Verify,
    workspace: Workspace,
    progress: Progress,
    *,
    parallel: Parallel = Parallel(),
) -> None:
    """Leaves the JSON of each proof, which a killed run does not make again. `quantized` is None where nothing was;
    then the converted checkpoint is what is built, for the ranks of `parallel`, and there is no quality."""
    built = quantized or converted

    def compare() -> dict[str, Any]:
        subjects = [describe_subject(converted, "original"), describe_subject(built, "quantized")]
        return compare_subjects(subjects, _plan(settings, spec), progress, folder=workspace.path).to_json()

    proofs: dict[str, Callable[[], dict[str, Any]]] = {
        CONVERSION: lambda: asdict(prove_conversion(source, converted, progress)),
        NETWORK: lambda: _prove_network(converted, built, spec, settings, progress, parallel),
        **({} if quantized is None else {QUALITY: compare}),
    }
    for name, make in proofs.items():
        if not workspace.is_done(name):
            path = workspace.path / name
            # A proof that failed by a number that is not finite has its report, too.
            path.write_text(json.dumps(spell_numbers(make()), indent=2, allow_nan=False) + "\n", encoding="utf-8")
            workspace.finish(name, [path])


def read_proofs(folder: Path) -> dict[str, Any]:
    """conversion, network and quality (None where nothing was quantized), as `prove` left them."""
    found = {name: folder / name for name in (CONVERSION, NETWORK, QUALITY)}
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in found.values()
    }


def _prove_network(
    converted: CheckpointFolder,
    built: CheckpointFolder,
    spec: NetworkSpec,
    settings: Verify,
    progress: Progress,
    parallel: Parallel,
) -> dict[str, Any]:
    """With the digest of the network, and of each rank's of a parallel model: those may be built."""
    architecture, original = built.architecture, describe_subject(converted, "original")
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
    digests = ranks.digests() if ranks is not None else ()
    return {
        "network_digest": digest_network(built, architecture, spec),
        "rank_digests": list(digests),
        **asdict(network),
        "sliced": not whole,
    }


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
