"""`trtseek export`: a checkpoint or a run's folder into each format, what is said of it, and what is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from pipeline.cli.export import FORMATS, OTHERS, command
from pipeline.errors import CheckpointError, CompatibilityError, ConfigError, StoreError
from pipeline.exports.formats import NAMES
from pipeline.exports.plan import REFUSE, WIDEN
from tests.evaluation.support import convert
from tests.exports import support


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


def load(folder: Path) -> dict[str, list[int]]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: t.view(torch.uint8).tolist() for file in files for name, t in load_file(file).items()}


def test_a_converted_checkpoint_comes_back(deepseek_v2_path: Path, tmp_path: Path) -> None:
    convert(deepseek_v2_path, tmp_path / "engine", "bfloat16")
    result = run(tmp_path / "engine", "--output", tmp_path / "back")
    assert result.exit_code == 0
    assert load(tmp_path / "back") == load(deepseek_v2_path)
    assert (tmp_path / "back/config.json").read_bytes() == (deepseek_v2_path / "config.json").read_bytes()


def test_a_run_stands_for_its_last_checkpoint(tmp_path: Path) -> None:
    """A run's folder links its stages: the quantized one goes out, in the format asked for, with what became of it."""
    support.quantize("llama", "awq", tmp_path)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "run.json").write_text("{}")
    (run_folder / "convert").symlink_to(tmp_path / "engine")
    (run_folder / "quantize").symlink_to(tmp_path / "quantized")
    result = run(run_folder, "--format", "awq", "--others", "16bit", "--output", tmp_path / "out")
    assert "export: awq: 12 linears in int4" in result.stderr
    assert "2 linears in 16 bits: its input is multiplied by a vector" in result.stderr
    assert result.stdout == f"{tmp_path / 'out'}\n"
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["quant_method"] == "awq"
    (run_folder / "quantize").unlink()
    with pytest.raises(CompatibilityError, match="no linear that awq could hold"):
        run(run_folder, "--format", "awq", "--output", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_what_is_there_is_not_written_over(llama_path: Path, tmp_path: Path) -> None:
    convert(llama_path, tmp_path / "engine", "bfloat16")
    (tmp_path / "back").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        run(tmp_path / "engine", "--output", tmp_path / "back")


def test_zero_points_as_a_config_says(tmp_path: Path) -> None:
    support.convert("llama", tmp_path)
    config = tmp_path / "zeros.yaml"
    text = support.write_text(tmp_path / "text.txt")
    config.write_text(
        f"model: {{path: {tmp_path / 'hf'}}}\ntarget: {{gpu: A100-80GB}}\nstages:\n  quantize:\n    group_size: 64\n"
        f"    calibration: {{files: [{text}], samples: 8, length: 32}}\n"
    )
    with pytest.raises(ConfigError, match="hf is written without zero points"):
        run(tmp_path / "engine", "--asymmetric", config, "--output", tmp_path / "back")
    arguments = ("--format", "awq", "--asymmetric", config, "--output", tmp_path / "out")
    result = run(tmp_path / "engine", *arguments)
    assert "8 linears in int4_zeros" in result.stderr and "which no engine has; nothing was proved" in result.stderr
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["group_size"] == 64


CALIBRATION = "calibration: {files: [text.txt], samples: 8, length: 32}"


@pytest.mark.parametrize(
    ("settings", "line", "told"),
    [
        ("method: gptq", 5, "stages.quantize.method: gptq has no variant with zero points"),
        ("method: none", 5, "stages.quantize.method: none has no variant with zero points"),
        ("method: awq\n    recipe: [{pattern: '*.fc', method: int8}]", 6, "recipe.rows.0.method: int8 has no variant"),
        ("recipe: auto\n    budget: {kl: 0.1}", 5, "stages.quantize.recipe: auto has no variant with zero points"),
        ("include: [mlp, head]", 5, "stages.quantize.include: lm_head would have zero points"),
        ("recipe: [{pattern: lm_head, method: rtn}]", 5, "stages.quantize.recipe: lm_head would have zero points"),
        ("exclude: [nothing.*]", 5, "stages.quantize.exclude: nothing.* matches no linear of the model"),
        ("recipe: [{pattern: 'x.*', method: rtn}]", 5, "stages.quantize.recipe: x.* matches no linear of the model"),
        ("include: [experts]", 5, "stages.quantize.include: no linear is left to quantize"),
        ("calibration: {files: [none.txt]}", 5, "stages.quantize.calibration.files: none.txt: there is no such file"),
        ("calibration: {files: [empty.txt]}", 5, "stages.quantize.calibration.files: empty.txt is empty"),
        ("calibration: {files: [text.txt], length: 4096}", 5, "calibration.length 4096 is more than the model's"),
        (
            "group_size: 128\n    include: [mlp, attention_input]",
            5,
            "stages.quantize.group_size: groups would be of several sizes: 128 ",
        ),
    ],
)
def test_what_a_config_cannot_ask_for_is_told_with_its_line(
    settings: str, line: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `validate` tells it, of a model of hidden size 128 and an MLP 192 wide."""
    support.convert("llama", tmp_path, hidden_size=128, intermediate_size=192)
    monkeypatch.chdir(tmp_path)
    support.write_text(Path("text.txt"))
    Path("empty.txt").touch()
    more = "" if "calibration:" in settings else f"    {CALIBRATION}\n"
    Path("zeros.yaml").write_text(
        f"model: {{path: hf}}\ntarget: {{gpu: A100-80GB}}\nstages:\n  quantize:\n    {settings}\n{more}"
    )
    with pytest.raises((ConfigError, CompatibilityError)) as caught:
        run("engine", "--format", "awq", "--asymmetric", "zeros.yaml", "--output", "out")
    assert caught.value.message.startswith(f"zeros.yaml:{line}: ") and told in caught.value.message
    assert not Path("out").exists()


def test_the_choices_are_the_tables() -> None:
    assert set(FORMATS) == set(NAMES)
    assert set(OTHERS) == {REFUSE, WIDEN}


def test_a_checkpoint_is_not_exported_into_itself(llama_path: Path, tmp_path: Path) -> None:
    convert(llama_path, tmp_path / "engine", "bfloat16")
    before = sorted((tmp_path / "engine").iterdir())
    (tmp_path / "link").symlink_to("engine")
    for place in ("engine/in", "link/deep/in"):
        with pytest.raises(CheckpointError, match=r"is within .*engine, which is exported"):
            run(tmp_path / "engine", "--output", tmp_path / place)
    assert sorted((tmp_path / "engine").iterdir()) == before


@pytest.mark.parametrize("format", ["hf", "gguf"])
def test_a_full_disk_is_said_and_leaves_nothing(
    format: str, llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(llama_path, tmp_path / "engine", "bfloat16")

    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pipeline.checkpoint.safetensors_file.SafetensorsWriter._put", fill)
    monkeypatch.setattr("pipeline.exports.gguf_file._append", fill)
    with pytest.raises(StoreError, match="out: the disk is full") as caught:
        run(tmp_path / "engine", "--format", format, "--output", tmp_path / "out")
    assert "--output" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_place_that_takes_no_folder(llama_path: Path, tmp_path: Path) -> None:
    convert(llama_path, tmp_path / "engine", "bfloat16")
    with pytest.raises(StoreError, match="/proc/none cannot be made there"):
        run(tmp_path / "engine", "--output", "/proc/none/out")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file is a file where a folder should be"):
        run(tmp_path / "engine", "--output", tmp_path / "file/out")
