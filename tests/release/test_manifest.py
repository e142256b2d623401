import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from pipeline.errors import PackageError
from pipeline.release.manifest import MANIFEST, SUMS, Built, check_release, find_wrong_sizes, list_files, write_manifest

BUILT = Built(backend="tensorrt_rtx", backend_version="1.7.1.116", sm=80, networks=["blake3:n"], digest="blake3:e")
GATES = [
    {"name": "network_exact", "value": 3e-6, "bound": 1e-4, "relation": "<=", "passed": True},
    {"name": "mean_kl", "value": 0.5, "bound": None, "relation": "<=", "passed": None},
]
VERIFICATION = {"network_digest": "blake3:n", "gates": GATES}
CHECKPOINT = {
    "architectures": ["LlamaForCausalLM"],
    "trtseek": {
        "format": 1,
        "dtype": "float16",
        "quantization": {
            "quant_algo": "W4A16_AWQ",
            "method": "awq",
            "group_size": 128,
            "quantized": {"a": 128, "b": 64},
        },
    },
}


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "package"
    for name, content in (
        ("model_repository/ensemble/config.pbtxt", b'name: "ensemble"\n'),
        ("model_repository/ensemble/1/.keep", b""),
        ("artifacts/engine-0/model.engine", bytes(range(256)) * 40_000),
        ("artifacts/two words/naïve.txt", b"x"),
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(content)
    return package


def write(folder, **changes):
    config = Config(name="r", model={"path": Path("checkpoints/m")}, target={"gpu": "A100"})
    arguments = {"built": BUILT, "verification": VERIFICATION, "checkpoint_config": CHECKPOINT, **changes}
    return write_manifest(folder, config=config, **arguments)


def test_sha256sum_agrees(folder):
    write(folder)
    done = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(line.removesuffix(": OK") for line in done.stdout.splitlines()) == [
        "artifacts/engine-0/model.engine",
        "artifacts/two words/naïve.txt",
        "manifest.json",
        "model_repository/ensemble/1/.keep",
        "model_repository/ensemble/config.pbtxt",
    ]


def test_sha256sum_finds_the_same_damage(folder):
    write(folder)
    (folder / "artifacts/two words/naïve.txt").write_bytes(b"y")
    done = subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    assert "naïve.txt: FAILED" in done.stdout
    assert check_release(folder).changed == ("artifacts/two words/naïve.txt",)


def test_what_the_manifest_says(folder):
    write(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    engine = folder / "artifacts/engine-0/model.engine"
    assert manifest["files"]["artifacts/engine-0/model.engine"] == {
        "sha256": hashlib.sha256(engine.read_bytes()).hexdigest(),
        "size": engine.stat().st_size,
    }
    assert manifest["target"] == {
        "gpu": "A100-80GB",
        "sm": 80,
        "backend": "tensorrt_rtx",
        "backend_version": "1.7.1.116",
    }
    assert manifest["model"] == {
        "architecture": "LlamaForCausalLM",
        "source": "m",
        "dtype": "float16",
        "quantization": {"quant_algo": "W4A16_AWQ", "method": "awq", "group_size": 128, "linears": 2},
    }
    assert manifest["gates"] == GATES
    assert manifest["network_digest"] == "blake3:n"
    assert manifest["config"]["stages"]["build"]["block_size"] == 64  # defaults are spelled out
    assert Config.model_validate_json(json.dumps(manifest["config"]))
    assert {"torch", "transformers", "tensorrt-rtx"} <= manifest["libraries"].keys()


def test_an_unquantized_model(folder):
    manifest = write(folder, checkpoint_config={**CHECKPOINT, "trtseek": {"dtype": "float32", "quantization": None}})
    assert manifest["model"]["quantization"] is None


def test_writing_twice_gives_the_same_bytes(folder):
    write(folder)
    first = [(folder / name).read_bytes() for name in (MANIFEST, SUMS)]
    write(folder)
    assert [(folder / name).read_bytes() for name in (MANIFEST, SUMS)] == first


def test_an_intact_release(folder):
    write(folder)
    (folder / "artifact.json").write_text("the store's own marker")
    assert not check_release(folder)


def test_damage_is_named(folder):
    write(folder)
    (folder / "model_repository/ensemble/config.pbtxt").write_text("edited")
    (folder / "artifacts/engine-0/model.engine").unlink()
    (folder / "artifacts/stray").write_text("")
    damage = check_release(folder)
    assert damage.changed == ("model_repository/ensemble/config.pbtxt",)
    assert damage.missing == ("artifacts/engine-0/model.engine",)
    assert damage.extra == ("artifacts/stray",)
    assert str(damage) == (
        "changed: model_repository/ensemble/config.pbtxt; missing: artifacts/engine-0/model.engine; "
        "not listed: artifacts/stray"
    )


def test_wrong_sizes_show_without_reading(folder):
    write(folder)
    assert find_wrong_sizes(folder) == []
    first, second = list_files(folder)[:2]
    size = (folder / second).stat().st_size
    (folder / first).unlink()
    with open(folder / second, "ab") as file:
        file.write(b"more")
    assert find_wrong_sizes(folder) == [
        f"{folder / first} is missing",
        f"{folder / second} has {size + 4:,} bytes, manifest.json says {size:,}",
    ]
    for text in ("{}", '{"files": {"a": {"size": 1e999}}}', "[" * 100_000):
        (folder / MANIFEST).write_text(text)
        with pytest.raises(PackageError, match="is not a manifest"):
            find_wrong_sizes(folder)


def test_a_flipped_bit_of_a_large_file_is_found(folder):
    write(folder)
    engine = folder / "artifacts/engine-0/model.engine"
    data = bytearray(engine.read_bytes())
    data[-1] ^= 1
    engine.write_bytes(data)
    assert check_release(folder).changed == ("artifacts/engine-0/model.engine",)


def test_a_changed_or_missing_manifest_is_found(folder):
    write(folder)
    (folder / MANIFEST).write_text("{}")
    assert check_release(folder).changed == (MANIFEST,)
    (folder / MANIFEST).unlink()
    assert check_release(folder).missing == (MANIFEST,)


def test_sums_that_leave_out_a_file_of_the_manifest_are_refused(folder):
    """Someone who removes a file and its line must not get away with it."""
    write(folder)
    (folder / "artifacts/two words/naïve.txt").unlink()
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    (folder / SUMS).write_text("".join(line for line in lines if "naïve" not in line))
    with pytest.raises(PackageError, match="list different files"):
        check_release(folder)


@pytest.mark.parametrize(
    "line", ["nonsense", "0" * 64 + " one-space", "0" * 64 + "  ../out", "0" * 64 + "  /etc/passwd", "g" * 64 + "  a"]
)
def test_a_line_that_sha256sum_would_not_write_is_refused(folder, line):
    write(folder)
    count = len((folder / SUMS).read_text().splitlines())
    with (folder / SUMS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(PackageError, match=rf"SHA256SUMS:{count + 1}: is not a line of sha256sum"):
        check_release(folder)


def test_a_folder_that_is_no_release(tmp_path):
    with pytest.raises(PackageError, match=r"SHA256SUMS: .*No such file"):
        check_release(tmp_path)


def test_a_release_can_be_moved(folder, tmp_path):
    write(folder)
    shutil.move(folder, tmp_path / "elsewhere")
    assert not check_release(tmp_path / "elsewhere")
    assert str(tmp_path) not in (tmp_path / "elsewhere" / MANIFEST).read_text()


def test_an_engine_of_another_network_is_not_released(folder):
    with pytest.raises(PackageError, match=r"of network blake3:n, verify\.json of blake3:other"):
        write(folder, verification={**VERIFICATION, "network_digest": "blake3:other"})


def test_a_failed_gate_is_not_released(folder):
    gates = [*GATES, {"name": "perplexity_ratio", "value": 1.2, "bound": 1.05, "relation": "<=", "passed": False}]
    with pytest.raises(PackageError, match="gates that failed: perplexity_ratio"):
        write(folder, verification={**VERIFICATION, "gates": gates})


def test_a_file_name_that_cannot_be_listed_is_refused(folder):
    (folder / "a\nb").write_text("")
    with pytest.raises(PackageError, match="cannot be listed"):
        write(folder)
