import json
import shutil

import pytest

from pipeline.cli import main
from pipeline.cli.comparison import ComparisonError
from pipeline.errors import StoreError
from pipeline.stages import convert
from tests import fixtures


def read(invoke, a, b):
    return json.loads(invoke("diff", str(a), str(b), "--json").stdout)


@pytest.fixture
def runs(workplace, monkeypatch, invoke):
    """Two runs of the convert stage, to bfloat16 and to float16."""
    monkeypatch.setattr("pipeline.stages.graph.load_stages", lambda: (convert.STAGE,))
    for dtype in ("bfloat16", "float16"):
        invoke("engine", "small", "--set", f"stages.convert.dtype={dtype}", "--set", f"name={dtype}")
    return workplace / "out" / "bfloat16", workplace / "out" / "float16"


def test_two_runs(runs, invoke):
    document = read(invoke, *runs)
    assert document["settings"] == [{"stage": "convert", "change": "dtype: bfloat16 → float16"}]
    part = document["parts"]["convert"]
    assert "trtseek.dtype: bfloat16 → float16" in part["config"]
    tensors = part["tensors"]
    assert (tensors["added"], tensors["removed"], tensors["reshaped"], tensors["changed"]) == ([], [], [], [])
    assert len(tensors["retyped"]) > 20
    assert all(row["before"].startswith("BF16") and row["after"].startswith("F16") for row in tensors["retyped"])
    text = invoke("diff", *map(str, runs)).stdout
    assert "dtype: bfloat16 → float16" in text
    assert "retyped tensors" in text


def test_a_run_and_itself_and_one_of_the_same_bytes(runs, invoke, tmp_path):
    assert read(invoke, runs[0], runs[0])["same"]
    assert "nothing differs" in invoke("diff", str(runs[0]), str(runs[0])).stdout
    shutil.copytree(runs[0].parent, tmp_path / "copy", symlinks=True)
    document = read(invoke, runs[0], tmp_path / "copy" / "bfloat16")
    assert document["same"]
    assert document["parts"] == {"convert": {"same": True}}


def test_stage_outputs_and_plain_checkpoints(runs, invoke, llama_path, tmp_path):
    one, other = (run / "convert" for run in runs)
    assert set(read(invoke, one, other)["parts"]) == {"convert"}
    assert read(invoke, runs[0], other)["settings"]  # a run and one of its kind

    def edit(tensors):
        tensors["model.norm.weight"][5] += 1

    changed = fixtures.llama(tmp_path / "changed", edit=edit, tokenizer=True)
    (row,) = read(invoke, llama_path, changed)["parts"]["checkpoint"]["tensors"]["changed"]
    assert (row["name"], row["changed"], round(row["largest"], 1)) == ("model.norm.weight", 1, 1.0)
    assert "1 of 128 values" in invoke("diff", str(llama_path), str(changed)).stdout
    crossed = read(invoke, llama_path, one)["parts"]
    assert set(crossed) == {"checkpoint and convert"}


def test_exit_code_is_asked_for(runs):
    assert main._run(["diff", *map(str, runs)]) == 0
    assert main._run(["diff", *map(str, runs), "--exit-code"]) == 1
    assert main._run(["diff", str(runs[0]), str(runs[0]), "--exit-code"]) == 0


def test_verifications_and_engines(tmp_path, invoke, monkeypatch):
    gate = {"name": "mean_kl", "value": 0.02, "bound": 0.05, "passed": True}
    engine = {
        "version": "1.7",
        "weights_bytes": 10,
        "profiles": [{"profile": "context", "workspace_bytes": 5, "kernels": 7}],
        "kernels": [{"kind": "gemm", "launches": 3}, {"kind": "copy", "launches": 1}],
        "fusions": [],
        "inputs": [{"name": "input_ids", "dtype": "int32", "shape": [-1]}],
        "outputs": [],
    }
    other = {**engine, "kernels": [{"kind": "gemm", "launches": 2}], "weights_bytes": 11}
    for side, value in (("a", 0.02), ("b", 0.04)):
        for part in ("verify", "build"):
            (tmp_path / side / part).mkdir(parents=True)
        report = {"network_digest": "blake3:0", "gates": [{**gate, "value": value}]}
        (tmp_path / side / "verify" / "verify.json").write_text(json.dumps(report))
        (tmp_path / side / "build" / "model.engine").touch()
    described = {tmp_path / "a" / "build": engine, tmp_path / "b" / "build": other}
    monkeypatch.setattr("pipeline.cli.inspection.describe", described.__getitem__)
    verify = read(invoke, tmp_path / "a" / "verify", tmp_path / "b" / "verify")["parts"]["verification"]
    assert verify["gates"] == [{"name": "mean_kl", "figure": "value", "a": 0.02, "b": 0.04}]
    build = read(invoke, tmp_path / "a" / "build", tmp_path / "b" / "build")["parts"]["engine"]
    assert build["figures"] == [{"name": "weights_bytes", "a": 10, "b": 11}]
    assert build["kernels"] == [
        {"kind": "gemm", "figure": "launches", "a": 3, "b": 2},
        {"kind": "copy", "figure": "launches", "a": 1, "b": None},
    ]
    text = invoke("diff", str(tmp_path / "a" / "build"), str(tmp_path / "b" / "build")).stdout
    assert "gemm  launches  3 → 2" in text


def test_nothing_to_compare(tmp_path, invoke, llama_path, runs):
    with pytest.raises(ComparisonError, match="there is no such file or folder"):
        invoke("diff", str(tmp_path / "nowhere"), str(llama_path))
    (tmp_path / "verify").mkdir()
    (tmp_path / "verify" / "verify.json").write_text("{}")
    with pytest.raises(ComparisonError, match="have nothing in common"):
        invoke("diff", str(tmp_path / "verify"), str(llama_path))
    marker = runs[0] / "convert" / "artifact.json"
    marker.write_bytes(marker.read_bytes()[:50])
    with pytest.raises(StoreError, match=r"artifact\.json cannot be read"):
        invoke("diff", *map(str, runs))


@pytest.mark.parametrize("text", ['{"a', "[]", '{"gates": []}', '{"gates": ["x"], "network_digest": "d"}'])
def test_damaged_report(invoke, tmp_path, text):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "verify.json").write_text(text)
    with pytest.raises(StoreError, match=r"a/verify.json is damaged"):
        invoke("diff", str(tmp_path / "a"), str(tmp_path / "b"))
