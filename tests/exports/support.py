"""Quantized engine checkpoints of the fixtures' models, and what they compute according to transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.network.spec import NetworkSpec
from pipeline.network.widening import widen_inputs
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.quantization.selection import Override, Rules
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.network.models import read_program
from tests.network.serving import serve
from tests.quantization.support import CalibrationSettings, Model, Settings

ALL = ("experts", "shared_experts", "mlp", "attention_output", "attention_input")
WRITE: dict[str, Callable[..., Path]] = {
    "llama": fixtures.llama,
    "qwen2": fixtures.qwen2,
    "v2": fixtures.deepseek_v2,
    "v3": fixtures.deepseek_v3,
    "moe": fixtures.deepseek_moe,
}
IDS = torch.randint(2, 500, (2, 24), generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True, kw_only=True)
class RecipeSettings(Settings):
    """Settings with a recipe's rows."""

    recipe: tuple[Override, ...] = ()

    @property
    def rules(self) -> Rules:
        return Rules(method=self.method, include=self.include, group_size=self.group_size, recipe=self.recipe)


def write_text(path: Path) -> Path:
    path.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(800)))
    return path


def convert(name: str, path: Path, **options: Any) -> CheckpointFolder:
    """The fixture as an engine checkpoint at `path`/engine, made without the converter."""
    hub = WRITE[name](path / "hf", tokenizer=True, **{"num_hidden_layers": 2, **options})
    return Model.load(hub).write(path / "engine", hub)


def quantize(
    name: str,
    method: str,
    path: Path,
    *,
    recipe: Mapping[str, str] | None = None,
    group: int = 64,
    kv_cache: str = "none",
    **options: Any,
) -> CheckpointFolder:
    """The fixture quantized, at `path`/quantized. `recipe`: pattern to method."""
    source = convert(name, path, **options)
    settings = RecipeSettings(
        method=method,
        include=ALL,
        group_size=group,
        calibration=CalibrationSettings(files=(write_text(path / "text.txt"),), samples=24, length=32),
        unrouted_experts="share_scale",
        kv_cache=kv_cache,
        recipe=tuple(Override(pattern=pattern, method=each) for pattern, each in (recipe or {}).items()),
    )
    workspace = FolderWorkspace(path / "quantized", journal=path / "quantized.journal")
    quantize_checkpoint(source, workspace, settings=settings)
    return CheckpointFolder.open(path / "quantized")


def our_logits(engine: CheckpointFolder, ids: torch.Tensor = IDS, *, wide_inputs: bool = False) -> torch.Tensor:
    """[N, T, V]: what the network computes with the engine checkpoint, in float32; but for `wide_inputs`, with inputs
    rounded where their linear has a scale for it."""
    spec = NetworkSpec(dtype=engine.architecture.dtype, block_size=8, max_seq_len=256, moe="dense")
    program = read_program(spec, engine.architecture, engine)
    program = widen_inputs(program) if wide_inputs else program
    found = [serve(program, sequences=[row.numpy()], steps=[(len(row),)]) for row in ids]
    return torch.stack([one["logits"] for (one,) in found])


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def logits_of(folder: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    """What transformers makes of a folder, in float32. Every tensor must have found its place."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not {name for name in info["unexpected_keys"] if ".layers.2." not in name}, "only MTP's may be left"
    with torch.no_grad():
        return model(ids).logits


def logits_of_state(
    engine: CheckpointFolder, state: Mapping[str, torch.Tensor], folder: Path, ids: torch.Tensor = IDS
) -> torch.Tensor:
    """The same of a state dict in the hub's names: written by the safetensors library, read by transformers."""
    folder.mkdir(parents=True)
    save_file({n: t.float().contiguous() for n, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in engine.config.items() if key not in ("trtseek", "quantization_config")}
    (folder / "config.json").write_text(json.dumps(config))
    return logits_of(folder, ids)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in units of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def damage(
    engine: CheckpointFolder, edit: Callable[[dict[str, torch.Tensor]], None], path: Path | None = None
) -> CheckpointFolder:
    """A copy of the engine checkpoint at `path`, in one file, after `edit` was at its tensors."""
    tensors = {name: engine.read(name).to_torch().clone() for name in engine.tensors}
    edit(tensors)
    path = path or engine.path.with_name("damaged")
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_bytes((engine.path / "config.json").read_bytes())
    return CheckpointFolder.open(path)


def spell_tokens(tokenizer_file: Path, size: int) -> None:
    """Gives every token a text of its own, in ASCII: llama.cpp holds back tokens that end within a character."""
    tokenizer = json.loads(tokenizer_file.read_text())
    special = {token: index for token, index in tokenizer["model"]["vocab"].items() if index < 2}
    tokenizer["model"]["vocab"] = special | {f"t{index:03}": index for index in range(2, size)}
    tokenizer_file.write_text(json.dumps(tokenizer))
