"""compare, verify and report as a user runs them, on a random model."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pipeline.cli import main
from pipeline.errors import GateError
from pipeline.evaluation.report.words import spell_bytes
from tests import fixtures
from tests.evaluation.support import convert

LOOSE = ("network_exact=1", "perplexity_ratio=null", "top1_agreement=null", "mean_kl=null")


def loosen(*gates: str) -> list[str]:
    return [part for gate in gates for part in ("--set", f"stages.verify.gates.{gate}")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A hub folder, what conversion makes of it, and another model of its shape."""
    folder = tmp_path_factory.mktemp("compare")
    source = fixtures.llama(folder / "hf", tokenizer=True)
    engine = convert(source, folder / "engine", "bfloat16")
    other = fixtures.llama(folder / "other", tokenizer=True, seed=1)
    (folder / "text.txt").write_text("def f(x): return x\n" * 40)
    (folder / "tasks.jsonl").write_text('{"prompt": "a", "choices": ["b", "c"], "answer": 0}\n')
    return [str(source), str(engine.path), str(other), str(folder / "text.txt"), str(folder / "tasks.jsonl")]


def test_all_checkpoints_come_in_one_table(checkpoints, invoke, tmp_path):
    *paths, text, tasks = checkpoints
    options = ("--text", text, "--tokens", "64", "--window", "32", "--context", "64,128", "--tasks", tasks)
    result = invoke("compare", *paths, *options, "--prompts", "1", "--report", str(tmp_path / "c.html"))
    lines = result.stdout.splitlines()
    table = {line.split()[0]: line.split() for line in lines[2:5]}
    assert list(table) == paths
    perplexity = {path: cells[3] for path, cells in table.items()}
    assert perplexity[paths[0]] == perplexity[paths[1]] != perplexity[paths[2]]
    assert table[paths[1]][4:] == ["1.0000", "0", "0", "100.00%", "100.00%", table[paths[0]][-1]]
    assert float(table[paths[2]][5]) > 0.1
    for title in ("layer:", "in it at a sample of 16 positions", "positions:", "context:", "prompt with KL"):
        assert title in result.stdout
    assert "token layers/s" in result.stderr
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")


def test_the_worst_prompts_say_whose_they_are(checkpoints, invoke):
    first, same, other, text, _ = checkpoints
    options = ("--text", text, "--tokens", "64", "--window", "32", "--no-baseline", "--prompts", "1")
    shown = invoke("compare", first, other, same, *options).stdout
    assert re.search(rf"prompt with KL [\d.]+ of {re.escape(other)}: '.", shown)
    samples = json.loads(invoke("compare", first, other, same, *options, "--json").stdout)["samples"]
    assert [sample["checkpoint"] for sample in samples] == [other]
    shown = invoke("compare", first, first, *options).stdout
    assert "prompts: none, since nothing differs" in shown and "prompt with" not in shown
    assert json.loads(invoke("compare", first, first, *options, "--json").stdout)["samples"] == []


def test_what_was_asked_for_and_is_not_to_be_had_is_noted(checkpoints, invoke):
    first, same, *_, text, _ = checkpoints
    options = ("--text", text, "--no-baseline", "--json")
    result = invoke("compare", first, same, *options, "--tokens", "100000000", "--window", "9000")
    assert "windows of 256 tokens, the longest context here; 9000 were asked for" in result.stderr
    scored = json.loads(result.stdout)["checkpoints"][0]["tokens"]
    assert scored == 255 * (256 * (scored // 255) // 256)  # of each window all but the last predict a token
    assert f"{scored // 255} windows of 256 tokens are scored, 100000000 tokens were asked for: {text} holds " in (
        result.stderr
    )
    assert "were asked for" not in invoke("compare", first, same, *options, "--tokens", "64", "--window", "32").stderr


def test_json_has_every_figure(checkpoints, invoke):
    *paths, text, _ = checkpoints
    result = invoke("compare", *paths[:2], "--text", text, "--tokens", "64", "--window", "32", "--json")
    original, converted = json.loads(result.stdout)["checkpoints"]
    assert (original["label"], converted["label"]) == tuple(paths[:2])
    assert len(converted["layers"]) == 3
    assert converted["mean_kl"] == converted["max_kl"] == 0
    assert converted["context"] == [] and converted["accuracy"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["A"], 2, "nothing to compare"),
        (["A", "absent"], 3, "absent: there is no such folder"),
        (["A", "B", "--text", "absent.txt"], 2, "absent.txt: No such file or directory"),
        (["A", "B", "--tokens", "8", "--window", "16", "--text", __file__], 8, "8 tokens are to be scored"),
        (["A", __file__], 3, "is no folder"),
        (["A", "B", "--tasks", "absent.jsonl"], 2, "error: absent.jsonl: No such file or directory\n"),
        (["A", "B", "--report", "absent/x.html"], 2, "absent does not exist"),
        (["A", "B", "--context", "1,x"], 2, "no list of numbers"),
        (["A", "B", "--context", "1"], 2, "at least 2 tokens"),
    ],
)
def test_what_cannot_be_compared_is_said(checkpoints, capsys, tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    names = {"A": checkpoints[0], "B": checkpoints[1]}
    given = [names.get(word, word) for word in arguments]
    if "--text" not in given:
        given += ["--text", checkpoints[3], "--tokens", "32", "--window", "16"]
    assert main._run(["compare", *given]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "damaged: transformer.layers.1.mlp.fc.weight is nan at [0, 3]"),
        (-math.inf, "damaged: transformer.layers.1.mlp.fc.weight is -inf at [0, 3]"),
        (3e38, "damaged: the output of layer 1 is not finite, and all weights there are"),
    ],
)
def test_figures_that_are_no_numbers_are_explained_behind_them(checkpoints, tmp_path, capsys, value, words):
    shutil.copytree(checkpoints[0], tmp_path / "damaged")
    for shard in (tmp_path / "damaged").glob("*.safetensors"):
        tensors = load_file(shard)
        if (name := "model.layers.1.mlp.gate_proj.weight") in tensors:
            tensors[name][0, 3 if not math.isfinite(value) else slice(None)] = value
        if value == 3e38 and (name := "model.layers.1.mlp.up_proj.weight") in tensors:
            tensors[name][0] = value
        save_file(tensors, shard, metadata={"format": "pt"})
    options = ["--text", checkpoints[3], "--tokens", "32", "--window", "16", "--no-baseline"]
    assert main._run(["compare", checkpoints[0], str(tmp_path / "damaged"), *options]) == 3
    shown = capsys.readouterr()
    assert words in shown.err and "nan" in shown.out


def test_verify_shows_what_it_proved_and_again_without_work(workplace, invoke):
    first = invoke("verify", "small", *loosen(*LOOSE))
    assert "report: out/small/report.html" in first.stderr
    assert "gates passed" in Path("out/small/report.html").read_text()
    assert "network_exact" in first.stdout
    assert "skip  mean_kl" in first.stdout
    again = invoke("verify", "small", *loosen(*LOOSE))
    assert again.stdout == first.stdout
    assert "cached" in again.stderr and "made" not in again.stderr
    record = json.loads(invoke("verify", "small", "--json", *loosen(*LOOSE)).stdout)
    assert [row["label"] for row in record["quality"]["checkpoints"]] == ["original", "quantized"]
    page = invoke("report", "small").stdout.strip()
    assert page == "out/small/report.html"
    text = Path(page).read_text()
    for checkpoint, stage in zip(
        record["quality"]["checkpoints"], ("converted weights", "quantized weights"), strict=True
    ):
        cell = re.search(rf"<tr><td>{checkpoint['label']}</td><td class=\"n\">(.*?)</td>", text)
        bar = re.search(rf"<span>{stage}</span><span><i [^>]*></i></span><span>(.*?)</span>", text)
        assert cell and bar and cell[1] == bar[1] == spell_bytes(checkpoint["bytes"])
    assert "6 gates" not in text and "3 gates passed" in text
    stamp = Path(page).stat().st_mtime_ns
    invoke("report", "small")
    assert Path(page).stat().st_mtime_ns == stamp  # it shows the same: not written again
    # A gate that fails shows its report all the same, and the page says so.
    with pytest.raises(GateError, match="mean_kl"):
        invoke("verify", "small", *loosen(*LOOSE[:-1], "mean_kl=1e-9"))
    assert "1 of 4 gates failed: mean_kl; 7 off" in Path(page).read_text()
    Path(page).unlink()
    with pytest.raises(GateError, match="mean_kl"):
        invoke("engine", "small", "--until", "verify", *loosen(*LOOSE[:-1], "mean_kl=1e-9"))
    assert "1 of 4 gates failed: mean_kl; 7 off" in Path(page).read_text()


def test_report_of_nothing_is_refused(workplace, capsys):
    assert main._run(["report", "small"]) == 7
    assert "shows no stage" in capsys.readouterr().err
