"""What the stages after `quantize` agree on: which checkpoint is built, and the network that is written for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.network.spec import NetworkSpec
    from pipeline.stages.artifact import Artifact

NETWORK_FILE = "network.json"  # of the build stage
PROOF = "network.json"  # of the prove stage: pipeline/evaluation/proofs.py


def built_checkpoint(inputs: Mapping[str, Artifact]) -> Path:
    """The quantized engine checkpoint, or the converted one where nothing is quantized."""
    return inputs["quantize" if "quantize" in inputs else "convert"].path


def proved_digests(inputs: Mapping[str, Artifact]) -> list[str]:
    """The digests of the networks that were proved, which may be built: one for each rank."""
    proof = json.loads((inputs["prove"].path / PROOF).read_text(encoding="utf-8"))
    return proof.get("rank_digests") or [proof["network_digest"]]


def network_parameters(config: Config) -> Mapping[str, Any]:
    """What of the config shapes the network, for fingerprints."""
    build, cache = config.stages.build, config.stages.quantize.kv_cache
    return {
        "block_size": build.block_size,
        "max_seq_len": build.max_seq_len,
        "moe": build.moe,
        "expert_payload": build.expert_payload,
        "kv_cache": "model" if cache == "none" or config.target.world.foreign else cache,
        "lowering": build.lowering.model_dump(mode="json"),
    }


def network_spec(config: Config, dtype: str) -> NetworkSpec:
    """The network of a config over an engine checkpoint of type `dtype`."""
    from pipeline.network.spec import Lowering, NetworkSpec

    parameters = network_parameters(config)
    return NetworkSpec(dtype=dtype, **{**parameters, "lowering": Lowering(**parameters["lowering"])})
