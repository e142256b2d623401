"""Opens a TensorRT-LLM checkpoint as its loader would; refuses what that would refuse, or read as something else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.safetensors_file import SafetensorsFile
from pipeline.checkpoint.strict_json import read_json
from pipeline.errors import CheckpointError
from pipeline.evaluation import rank_contract
from pipeline.evaluation.rank_contract import Contract

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

HINT = "write the rank checkpoints again"


class RankCheckpoint:
    """`contract`: what config.json promises. Raises CheckpointError, naming file, key or tensor, on opening."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_json(folder / "config.json")
        check_keys(config, str(folder / "config.json"))
        self.contract = Contract(config, self._read_layers(config))
        self.files = [
            SafetensorsFile(folder / f"rank{rank}.safetensors") for rank in range(self.contract.size("world_size"))
        ]
        for rank, file in enumerate(self.files):
            check_tensors(self.contract, rank, file)

    def read(self, rank: int, name: str) -> torch.Tensor:
        """A view of the file."""
        return self.files[rank].read(name).to_torch()

    def release(self, rank: int, name: str) -> None:
        """Lets go of the tensor's resident pages."""
        self.files[rank].release(name)

    def _read_layers(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        if config["quantization"].get("quant_algo") != "MIXED_PRECISION":
            return None
        path = self.folder / "quant_cfg.json"
        whole = read_json(path)
        layers: dict[str, dict[str, Any]] = whole.get("quantized_layers", {})
        for name, row in layers.items():
            unknown = row.keys() - rank_contract.QUANTIZATION_KEYS
            if unknown or row.get("quant_algo") not in rank_contract.MIXED_ALGOS:
                raise CheckpointError(f"{path}: {name} is {row}, which TensorRT-LLM does not read", hint=HINT)
        return layers


def check_keys(config: Mapping[str, Any], origin: str) -> None:
    """Raises CheckpointError for a key that TensorRT-LLM does not know, and for values that contradict each other."""
    architecture = config.get("architecture")
    if architecture not in rank_contract.CLASS_KEYS:
        raise CheckpointError(f"{origin}: architecture {architecture} is none of those checked here", hint=HINT)
    tables = (
        ("", config, rank_contract.KEYS | rank_contract.CLASS_KEYS[architecture]),
        ("quantization.", config["quantization"], rank_contract.QUANTIZATION_KEYS),
        ("mapping.", config["mapping"], rank_contract.MAPPING_KEYS),
        ("moe.", config.get("moe", {}), rank_contract.MOE_KEYS),
    )
    for prefix, values, known in tables:
        unknown = sorted(values.keys() - known)
        if unknown:
            raise CheckpointError(f"{origin}: TensorRT-LLM knows no key {prefix}{unknown[0]}", hint=HINT)
    if config.get("dtype") not in rank_contract.TYPES:
        raise CheckpointError(f"{origin}: dtype {config.get('dtype')} is none of those checked here", hint=HINT)
    algo = config["quantization"].get("quant_algo")
    if algo not in (None, "MIXED_PRECISION", *rank_contract.ALGOS):
        raise CheckpointError(f"{origin}: quant_algo {algo} is none of those checked here", hint=HINT)
    m = config["mapping"]
    if m["tp_size"] * m["pp_size"] * m.get("cp_size", 1) != m["world_size"]:
        raise CheckpointError(f"{origin}: mapping {m} does not multiply to its world_size", hint=HINT)
    if m["moe_tp_size"] * m["moe_ep_size"] != m["tp_size"]:
        raise CheckpointError(f"{origin}: moe_tp_size x moe_ep_size is not tp_size in mapping {m}", hint=HINT)


def check_tensors(contract: Contract, rank: int, file: SafetensorsFile) -> None:
    """Raises CheckpointError for a tensor that is missing, left over, or of another type or shape."""
    expected = contract.list_tensors(rank)
    missing, left = sorted(expected.keys() - file.tensors.keys()), sorted(file.tensors.keys() - expected.keys())
    if missing:
        raise CheckpointError(f"{file.path}: Required but not provided tensors: {', '.join(missing[:8])}", hint=HINT)
    if left:
        raise CheckpointError(f"{file.path}: TensorRT-LLM would not read {', '.join(left[:8])}", hint=HINT)
    for name, (dtype, shape) in expected.items():
        info = file.tensors[name]
        if (info.dtype, info.shape) != (dtype, shape):
            raise CheckpointError(
                f"{file.path}: {name} is {info.dtype}{list(info.shape)}, TensorRT-LLM wants {dtype}{list(shape)}",
                hint=HINT,
            )
