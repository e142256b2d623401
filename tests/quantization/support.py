"""Engine tensors held in memory, made from a fixture's hub files, for tests that need no converter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.reference import build_hf_layer, build_hf_rotary, causal_mask
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.quantization.selection import Override, Rules


@dataclass
class MemorySource:
    """A TensorSource over torch tensors under engine names."""

    values: dict[str, torch.Tensor]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(name, RawTensor.from_torch(v).dtype, tuple(v.shape)) for name, v in self.values.items()
        }

    def read(self, name: str) -> RawTensor:
        return RawTensor.from_torch(self.values[name])


@dataclass
class Model:
    """A fixture as engine tensors, and its HF decoder layers."""

    config: dict[str, Any]
    architecture: Architecture
    source: MemorySource

    @staticmethod
    def load(path: Path) -> Model:
        config = json.loads((path / "config.json").read_text())
        architecture = parse_architecture(config)
        hub = {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        mappings = layout_for(architecture).mappings()
        values = {m.target: m.forward([hub[s] for s in m.sources]) for m in mappings if m.sources[0] in hub}
        return Model(config, architecture, MemorySource(values))

    def write(self, path: Path, like: Path) -> CheckpointFolder:
        """An engine checkpoint folder, by the safetensors library, with the tokenizer of the folder `like`."""
        path.mkdir(parents=True)
        save_file(self.source.values, path / "model.safetensors")
        dtype = self.config["torch_dtype"]
        config = {**self.config, "trtseek": {"format": 1, "dtype": dtype, "quantization": None}}
        (path / "config.json").write_text(json.dumps(config, indent=2))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (like / name).exists():
                shutil.copyfile(like / name, path / name)
        return CheckpointFolder.open(path)

    def run_layer(self, layer: int, values: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """The HF layer's output [B, T, H] in float32 with the given engine tensors."""
        state = {}
        for mapping in layout_for(self.architecture).mappings():
            if mapping.layer == layer and mapping.target in values:
                for name, part in zip(mapping.sources, mapping.backward(values[mapping.target]), strict=True):
                    state[name.removeprefix(f"model.layers.{layer}.")] = part
        module = build_hf_layer(self.config, layer, state, torch.float32)
        length = hidden.shape[1]
        embeddings = build_hf_rotary(self.config)(hidden, torch.arange(length)[None].expand(hidden.shape[0], -1))
        mask = causal_mask(length, torch.float32)
        with torch.no_grad():
            out: torch.Tensor = module(hidden, attention_mask=mask, position_embeddings=embeddings)
            return out


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    files: tuple[Path, ...] = ()
    samples: int = 16
    length: int = 32
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The attributes that quantization reads of `stages.quantize`."""

    method: str = "awq"
    group_size: int = 128
    include: tuple[str, ...] = ("experts", "shared_experts", "mlp", "attention_output")
    exclude: tuple[str, ...] = ()
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    unrouted_experts: str = "round_to_nearest"
    clip: bool = False
    kv_cache: str = "none"
    recipe: tuple[Override, ...] = ()

    @property
    def rules(self) -> Rules:
        return Rules(
            method=self.method,
            include=self.include,
            exclude=self.exclude,
            group_size=self.group_size,
            recipe=self.recipe,
        )


def watch_pages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """From now on the tensors of any folder that were read, and not released since."""
    held: set[str] = set()
    read, release = CheckpointFolder.read, CheckpointFolder.release

    def read_watched(self: CheckpointFolder, name: str) -> RawTensor:
        held.add(name)
        return read(self, name)

    def release_watched(self: CheckpointFolder, name: str, *place: int) -> None:
        held.discard(name)
        release(self, name, *place)

    monkeypatch.setattr(CheckpointFolder, "read", read_watched)
    monkeypatch.setattr(CheckpointFolder, "release", release_watched)
    return held
