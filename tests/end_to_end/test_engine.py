"""From a checkpoint to a package: what a run leaves, what a second run does, and what kills and failed gates leave."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.stages import graph
from tests.end_to_end.support import Project, write_project

NAMES = tuple(name for name in graph.NAMES if name not in ("job", "sensitivity"))  # these only some configs have


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, deepseek_v2_path: Path) -> Project:
    project = write_project(tmp_path_factory.mktemp("finished"), deepseek_v2_path)
    result = project.trtseek("engine", "tiny.yaml")
    assert result.returncode == 0, result.stderr
    return project


def test_every_stage_leaves_its_artifact(finished: Project) -> None:
    assert [name for name in NAMES if (finished.run / name / "artifact.json").is_file()] == list(NAMES)


def test_what_was_proved_is_what_was_built_and_packaged(finished: Project) -> None:
    proof = json.loads((finished.run / "verify/verify.json").read_text())
    engine = json.loads((finished.run / "build/engine.json").read_text())
    manifest = json.loads((finished.run / "package/manifest.json").read_text())
    network = json.loads(next((finished.run / "package/artifacts").glob("checkpoint-*/network.json")).read_text())
    digests = {proof["network_digest"], engine["network_digest"], manifest["network_digest"], network["digest"]}
    assert len(digests) == 1
    assert engine["sm"] == 80
    passed = {gate["name"]: gate["passed"] for gate in proof["gates"]}
    bounded = {"conversion", "network_exact", "network_declared", "mean_kl"}
    assert {name for name, verdict in passed.items() if verdict} == bounded
    assert {verdict for name, verdict in passed.items() if name not in bounded} == {None}


def test_the_network_is_rebuilt_from_the_package_alone(finished: Project) -> None:
    """What a machine without a GPU serves: the checkpoint and network.json of the package, nothing else."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.evaluation.forward import read_program
    from pipeline.network.spec import NetworkSpec

    checkpoint = next((finished.run / "package/artifacts").glob("checkpoint-*"))
    network = json.loads((checkpoint / "network.json").read_text())
    source = CheckpointFolder.open(checkpoint)
    spec = NetworkSpec.from_json(json.dumps(network["spec"]))
    assert read_program(source, source.architecture, spec).digest() == network["digest"]


def test_the_run_has_a_page_that_shows_all_of_it(finished: Project) -> None:
    page = (finished.run / "report.html").read_text()
    for words in (*NAMES, "4 gates passed", "Tokens per expert", "Worst prompts, side by side"):
        assert words in page, words


def test_the_package_passes_sha256sum(finished: Project) -> None:
    result = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=finished.run / "package", check=False
    )
    assert result.returncode == 0


def test_the_package_is_made_of_links(finished: Project) -> None:
    packaged = next((finished.run / "package/artifacts").glob("engine-*/*.engine"))
    assert packaged.samefile(next((finished.run / "build").glob("*.engine")))


def test_a_second_run_makes_nothing(finished: Project) -> None:
    before = {name: finished.artifact(name)["created"] for name in NAMES}
    result = finished.trtseek("engine", "tiny.yaml")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cached") == len(NAMES)
    assert {name: finished.artifact(name)["created"] for name in NAMES} == before


@pytest.mark.parametrize("what", ["convert", "quantize", "build", "package", "build/model.engine"])
def test_inspect_reads_what_every_stage_left(finished: Project, what: str) -> None:
    result = finished.trtseek("inspect", str(finished.run / what))
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 100


def test_plan_and_status_know_that_all_is_made(finished: Project) -> None:
    for verb in ("plan", "status"):
        result = finished.trtseek(verb, "tiny.yaml", "--json")
        assert result.returncode == 0, result.stderr
        json.loads(result.stdout)


def test_a_changed_setting_runs_its_stage_and_those_after_it(finished: Project, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "copy", symlinks=True)
    copy = Project(tmp_path / "copy")
    result = copy.trtseek("engine", "tiny.yaml", "--set", "stages.package.max_queue_size=7")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cached") == 5
    assert "max_queue_size: 0 → 7" in result.stderr


def test_another_bound_is_judged_and_neither_measured_nor_built_again(finished: Project, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "copy", symlinks=True)
    copy = Project(tmp_path / "copy")
    failed = copy.trtseek("engine", "tiny.yaml", "--set", "stages.verify.gates.mean_kl=1e-9")
    assert failed.returncode == 5 and "verify: runs: gates.mean_kl" in failed.stderr
    assert "prove: cached" in failed.stderr and "mean_kl" in failed.stderr
    passed = copy.trtseek("engine", "tiny.yaml", "--set", "stages.verify.gates.mean_kl=9")
    assert passed.returncode == 0, passed.stderr
    assert all(f"{stage}: cached" in passed.stderr for stage in ("quantize", "prove", "build"))
    assert "verify: made" in passed.stderr and "package: made" in passed.stderr


def test_a_failed_gate_stops_before_the_build_and_keeps_its_report(tmp_path: Path, deepseek_v2_path: Path) -> None:
    project = write_project(tmp_path, deepseek_v2_path)
    fails = ("--set", "stages.quantize.method=rtn", "--set", "stages.verify.gates.mean_kl=1e-9")
    result = project.trtseek("engine", "tiny.yaml", *fails)
    assert result.returncode == 5
    assert "mean_kl" in result.stderr
    assert "worst layer: " in result.stderr
    report = project.run / "verify.failed" / "verify.txt"
    assert str(Path("out/tiny/verify.failed/verify.txt")) in result.stderr
    assert "FAIL  mean_kl" in report.read_text()
    assert not (project.run / "verify").exists()
    assert not (project.run / "build").exists()
    again = project.trtseek("engine", "tiny.yaml", *fails[:-1], "stages.verify.gates.mean_kl=1.0", "--until", "verify")
    assert again.returncode == 0, again.stderr
    assert not (project.run / "verify.failed").exists()
