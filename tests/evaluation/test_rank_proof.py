"""The proof of rank checkpoints finds a wrong writer's mistakes, and its loader refuses what TensorRT-LLM's would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import CheckpointError
from pipeline.evaluation.rank_layouts import undo_processed
from pipeline.evaluation.rank_proof import RankProof, prove_ranks
from tests.engine.tensorrt_llm.rank_cases import make_engine, write

Tensors = dict[str, torch.Tensor]
LAYER = "transformer.layers.0."


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[CheckpointFolder, Path]:
    """INT4 with a scale of the input that was not folded (grouped heads: attention.dense), on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    engine = make_engine(folder, "qwen2", "awq")
    write(engine, folder / "ranks", tensor=2)
    return engine, folder / "ranks"


def prove(
    written: tuple[CheckpointFolder, Path], folder: Path, edit: Callable[[Tensors], None], ranks: Sequence[int] = (0,)
) -> RankProof:
    """With some ranks' tensors edited."""
    engine, original = written
    shutil.copytree(original, folder / "ranks")
    for rank in ranks:
        path = folder / "ranks" / f"rank{rank}.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return prove_ranks(folder / "ranks", engine, sm=90, tokens=0)


def swap(first: str, second: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return edit


def change(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = how(tensors[name].clone())

    return edit


def swap_nibbles(packed: torch.Tensor) -> torch.Tensor:
    stored = packed.view(torch.uint8)
    return (stored >> 4 | stored << 4).view(torch.int8)


MISTAKES = {
    "gate and up exchanged": (swap(f"{LAYER}mlp.fc.weight", f"{LAYER}mlp.gate.weight"), f"{LAYER}mlp.fc.weight"),
    "nibbles exchanged": (change(f"{LAYER}mlp.proj.weight", swap_nibbles), f"{LAYER}mlp.proj.weight"),
    "k before q": (
        change(f"{LAYER}attention.qkv.bias", lambda t: torch.cat([t[128:192], t[:128], t[192:]])),
        f"{LAYER}attention.qkv.bias",
    ),
    "scales transposed in blocks": (
        change(f"{LAYER}mlp.fc.weights_scaling_factor", lambda t: t.T.reshape(t.shape)),
        f"{LAYER}mlp.fc.weights_scaling_factor",
    ),
    "pre-scale inverted": (
        change(f"{LAYER}attention.dense.prequant_scaling_factor", lambda t: 1 / t),
        f"{LAYER}attention.dense.prequant_scaling_factor",
    ),
    "pre-scale where it was folded": (
        change(f"{LAYER}mlp.fc.prequant_scaling_factor", lambda t: t * 1.01),
        f"{LAYER}mlp.fc.prequant_scaling_factor",
    ),
    "cache scale reciprocal": (
        change(f"{LAYER}attention.kv_cache_scaling_factor", lambda t: 1 / t),
        f"{LAYER}attention.kv_cache_scaling_factor",
    ),
    "one element of the head": (
        change("lm_head.weight", lambda t: t.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(0.5).half())),
        "lm_head.weight",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_and_named(mistake: str, written: tuple[CheckpointFolder, Path], tmp_path: Path) -> None:
    edit, name = MISTAKES[mistake]
    proof = prove(written, tmp_path, edit, ranks=[0, 1])
    assert not proof.holds
    assert name in proof.differing


def test_right_ranks_hold(written: tuple[CheckpointFolder, Path], tmp_path: Path) -> None:
    assert prove(written, tmp_path, lambda tensors: None).holds


def test_what_tensorrt_llm_refuses(written: tuple[CheckpointFolder, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Required but not provided tensors: transformer\.ln_f\.weight"):
        prove(written, tmp_path / "a", lambda tensors: tensors.__delitem__("transformer.ln_f.weight"))
    with pytest.raises(CheckpointError, match=r"would not read transformer\.layers\.0\.extra"):
        prove(written, tmp_path / "b", lambda tensors: tensors.update({LAYER + "extra": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is F32\[130, 256\], TensorRT-LLM wants F16"):
        prove(written, tmp_path / "c", change("lm_head.weight", lambda t: t.float()))
    with pytest.raises(CheckpointError, match=r"the padding of lm_head\.weight is not zero"):
        prove(written, tmp_path / "d", change("lm_head.weight", lambda t: t + 1), ranks=[1])
    with pytest.raises(CheckpointError, match=r"ranks hold different transformer\.layers\.0\.input_layernorm\.weight"):
        prove(written, tmp_path / "e", change(f"{LAYER}input_layernorm.weight", lambda t: t + 1), ranks=[1])


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        ("quantization", "algo", "AWQ", r"knows no key quantization\.algo"),
        ("", "rope_theta", 1e4, "knows no key rope_theta"),
        ("mapping", "moe_tp_size", 1, "moe_tp_size x moe_ep_size is not tp_size"),
        ("quantization", "quant_algo", "INT4", "quant_algo INT4"),
        ("", "dtype", "float8", "dtype float8"),
        ("", "architecture", "LLaMAForCausalLM", "architecture LLaMAForCausalLM"),
    ],
)
def test_keys(
    place: str, key: str, value: object, message: str, written: tuple[CheckpointFolder, Path], tmp_path: Path
) -> None:
    engine, ranks = written
    shutil.copytree(ranks, tmp_path / "ranks")
    config = json.loads((ranks / "config.json").read_text())
    (config[place] if place else config)[key] = value
    (tmp_path / "ranks" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        prove_ranks(tmp_path / "ranks", engine, sm=90)


@pytest.mark.parametrize(("bits", "sm"), [(4, 80), (4, 90), (8, 80), (8, 90)])
def test_processed_weights_by_hand(bits: int, sm: int) -> None:
    """One value put where a description of the layout says it goes: input 10, output 5 of 64 x 64."""
    order = {4: [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10], 8: [0, 1, 8, 9, 2, 3, 10]}[bits]
    place = order.index(10)  # its place among the inputs, as an MMA reads them
    together = 16 // bits
    index = (5 // together * together * 64 + 5 % together * 64 + place) if sm < 90 else 5 * 64 + place
    word = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]
    stored = torch.full((64 * 64,), 1 << (bits - 1), dtype=torch.uint8)  # zeros, once made unsigned
    start = index // len(word) * len(word)
    stored[start + word.index(index % len(word))] += 3
    if bits == 4:
        stored = stored[0::2] | stored[1::2] << 4
    weight = undo_processed(stored, 64, 64, bits, sm)
    assert weight[5, 10] == 3 and int(weight.count_nonzero()) == 1
