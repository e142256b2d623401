import pytest

from pipeline.errors import CheckpointError, CompatibilityError, ConfigError, StoreError


def test_makes_shows_and_reuses(workplace, toy_stages, invoke):
    result = invoke("engine", "small.yaml")
    assert result.stdout.splitlines() == ["convert  out/small/convert", "package  out/small/package"]
    assert "convert: working" in result.stderr
    assert "package: made in" in result.stderr
    assert (workplace / "out/small/package/convert.txt").is_file()
    again = invoke("engine", "small")
    assert again.stdout == result.stdout
    assert "working" not in again.stderr
    assert again.stderr.count("cached") == 2


def test_options_reach_the_executor(workplace, toy_stages, invoke):
    assert invoke("engine", "small", "--until", "convert").stdout == "convert  out/small/convert\n"
    assert "working" in invoke("engine", "small", "--force", "convert", "--until", "convert").stderr
    assert "working" in invoke("engine", "small", "--set", "stages.convert.dtype=float16", "--until", "convert").stderr
    with pytest.raises(StoreError, match="convert is not in the store; --from package does not make it"):
        invoke("engine", "small", "--set", "stages.convert.dtype=float32", "--from", "package")
    with pytest.raises(ConfigError, match="no stage 'pack'"):
        invoke("engine", "small", "--from", "pack")


def test_impossible_is_refused_before_any_work(workplace, toy_stages, invoke):
    with pytest.raises(CompatibilityError, match="max_seq_len"):
        invoke("engine", "small", "--set", "stages.build.max_seq_len=1000000")
    with pytest.raises(CheckpointError, match="nowhere"):
        invoke("engine", "small", "--set", "model.path=nowhere")
    assert not (workplace / "out").exists()


def test_cached_run_imports_nothing_heavy_and_is_quick(workplace, cpu_seconds):
    """With the real stages' declarations; their work is replaced by one file each."""
    script = (
        "import dataclasses, sys\n"
        "import pipeline.stages.graph as graph\n"
        "def work(context):\n"
        "    assert 'first' in sys.argv, 'not cached'\n"
        "    (context.workspace.path / 'file').write_text('x')\n"
        "stages = tuple(dataclasses.replace(stage, run=work) for stage in graph.load_stages())\n"
        "graph.load_stages = lambda: stages\n"
        "from pipeline.cli.main import _run\n"
        "code = _run(['engine', 'small'])\n"
        "heavy = {'torch', 'transformers', 'tensorrt_rtx', 'tokenizers', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    cpu_seconds("-c", script, "first", runs=1)
    assert cpu_seconds("-c", script) < 1.5


def test_notes_come_once_after_what_was_made(workplace, toy_stages, invoke):
    a100 = ("small", "--set", "target.gpu=A100-80GB")
    note = "note: TensorRT-RTX takes SM80 as a build target"
    first = invoke("engine", *a100).stderr
    assert first.splitlines()[-1].startswith(note)
    assert note not in invoke("engine", *a100).stderr
    for verb in ("plan", "validate"):
        assert note in invoke(verb, *a100).stdout
    refused = invoke("status", *a100)
    assert note not in refused.stdout + refused.stderr


def test_what_this_host_lacks_is_said_before_the_work(workplace, toy_stages, invoke, monkeypatch):
    monkeypatch.setattr("pipeline.engine.tensorrt.list_device_sms", list)
    lines = invoke("engine", "small", "--set", "target.backend=tensorrt").stderr.splitlines()
    assert "this host has not" in lines[0]
    assert "working" in "".join(lines[1:])
