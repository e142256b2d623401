import json

import pytest
from safetensors import safe_open

from tests.checkpoint.foreign.cases import write


def read(invoke, *options):
    return json.loads(invoke("plan", "small", "--json", *options).stdout)


def test_says_what_runs_and_why(workplace, toy_stages, invoke):
    assert [stage["state"] for stage in read(invoke)["stages"]] == ["run", "run"]
    invoke("engine", "small")
    stages = read(invoke)["stages"]
    assert [stage["state"] for stage in stages] == ["cached", "cached"]
    assert all((workplace / stage["path"] / "artifact.json").is_file() for stage in stages)
    changed = read(invoke, "--set", "stages.convert.dtype=float16")["stages"]
    assert [stage["reasons"] for stage in changed] == [["dtype: unset → float16"], ["convert changed"]]
    assert [stage["state"] for stage in read(invoke, "--force", "package")["stages"]] == ["cached", "run"]


def test_makes_nothing(workplace, toy_stages, invoke):
    invoke("plan", "small")
    found = [path for path in (workplace / "out").rglob("*") if path.is_file()]
    assert all(path.name == "digests.jsonl" or path.parent.name == ".headers" for path in found)


def test_memory_adds_up(workplace, toy_stages, invoke, llama_path):
    memory = read(invoke)["memory"]
    config = json.loads((llama_path / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    assert memory["kv_bytes_per_token"] == 2 * layers * heads * head * 2  # K and V, bfloat16
    assert memory["gpu_bytes"] == 24 * 2**30
    assert memory["pool_tokens"] == 2 * 128  # two sequences of the longest
    parts = ("weights", "workspace", "pool", "io", "reserve")
    assert memory["total_bytes"] == sum(memory[f"{part}_bytes"] for part in parts)
    assert memory["workspace_bytes"] == max(profile["workspace_bytes"] for profile in memory["profiles"])
    assert memory["fits"]
    quantized = memory["weights_bytes"]
    assert quantized < read(invoke, "--set", "stages.quantize.method=none")["memory"]["weights_bytes"]


def test_what_another_tool_quantized_is_counted_as_it_is_held(workplace, toy_stages, invoke, tmp_path):
    path = write("compressed-int8-dynamic", tmp_path / "int8")
    settings = ("stages.quantize.method=none", "stages.convert.dtype=bfloat16", f"model.path={path}")
    options = [word for setting in settings for word in ("--set", setting)]
    plan, wide = read(invoke, *options), read(invoke, *options, "--set", f"model.path={path}-plain")
    with safe_open(path / "model.safetensors", "np") as file:
        names = list(file.keys())
        shapes = {name: file.get_slice(name).get_shape() for name in names}
    held = [shape for name, shape in shapes.items() if f"{name}_scale" in shapes]
    saved = sum(2 * rows * columns - (rows * columns + 4 * rows) for rows, columns in held)
    assert wide["memory"]["weights_bytes"] - plan["memory"]["weights_bytes"] == saved > 0
    disk = [told["host"]["stages"][0]["disk_bytes"] for told in (wide, plan)]
    assert disk[0] - disk[1] == saved
    assert not any("16 bits" in note for note in plan["notes"])


def test_largest_batch_of_each_length(workplace, toy_stages, invoke):
    (largest,) = read(invoke)["memory"]["largest"]
    assert largest["length"] == 128
    assert largest["batch"] > 2  # the config's own batch fits
    smaller = read(invoke, "--set", "target.gpu=RTX-4080")["memory"]["largest"]
    assert 0 < smaller[0]["batch"] < largest["batch"]


def test_several_gpus_share_the_model(workplace, toy_stages, invoke):
    whole, half = (read(invoke, "--set", f"target.parallel.tensor={size}")["memory"] for size in (1, 2))
    assert (whole["gpus"], half["gpus"]) == (1, 2)
    assert half["parallel"] == {"tensor": 2, "pipeline": 1, "expert": 1}
    assert whole["weights_bytes"] / 2 < half["weights_bytes"] < whole["weights_bytes"]
    assert half["kv_bytes_per_token"] * 2 == whole["kv_bytes_per_token"]
    assert half["fits"] and half["largest"][0]["batch"] > whole["largest"][0]["batch"]
    text = invoke("plan", "small", "--set", "target.parallel.tensor=2").stdout
    assert "memory of each of 2 RTX-4090 (tensor 2)" in text
    assert "an engine for each of 2 GPUs" in text


def test_what_gpus_send_each_other(workplace, toy_stages, invoke, deepseek_v2_path):
    options = [f"model.path={deepseek_v2_path}", "stages.quantize.group_size=32"]
    words = [word for option in options for word in ("--set", option)]
    assert read(invoke, *words)["exchanges"] == []
    assert "sent between GPUs" not in invoke("plan", "small", *words).stdout
    spread = [*words, "--set", "target.parallel={tensor: 2, expert: 2}"]
    config = json.loads((deepseek_v2_path / "config.json").read_text())
    row, layers = 2 * config["hidden_size"], config["num_hidden_layers"]
    reduced, *ways = read(invoke, *spread)["exchanges"]
    assert (reduced["exchange"], reduced["count"]) == ("all-reduce", 1 + 2 * layers)
    assert reduced["bytes"] == reduced["count"] * 2 * row
    assert [way["used"] for way in ways] == [False, False, True]
    padded = ways[2]
    assert (padded["exchange"], padded["count"]) == ("native all-to-all, padded", layers - 1)
    assert (padded["there_bytes"], padded["back_bytes"]) == (4 * (row + 4), 4 * row)
    plugin = [*spread, "--set", "stages.build.lowering.moe_all_to_all=plugin", "--set"]
    assert [way["used"] for way in read(invoke, *plugin, "stages.build.expert_payload=fp8")["exchanges"]] == [
        *(True, False, True, False)
    ]
    lines = [
        line.split() for line in invoke("plan", "small", *plugin, "stages.build.expert_payload=fp8").stdout.splitlines()
    ]
    (fp8,) = [line for line in lines if line[:3] == ["moe_all_to_all,", "FP8", "rows"]]
    (native,) = [line for line in lines if line[:2] == ["native", "all-to-all,"]]
    assert "instead" not in fp8 and native[-1] == "instead"


def test_what_a_run_takes_of_this_host(workplace, toy_stages, invoke):
    host = read(invoke)["host"]
    assert [row["stage"] for row in host["stages"]] == ["convert", "quantize", "build"]
    assert host["disk_bytes"] == sum(row["disk_bytes"] for row in host["stages"])
    lines = [line.split() for line in invoke("plan", "small").stdout.splitlines()]
    assert ["estimates", "for", "this", "host:"] in [line[:4] for line in lines]
    assert any(line[:1] == ["quantize"] and line[3:] == ["-", "-"] for line in lines)  # AWQ was not measured at size


def test_what_serving_takes_of_this_host(workplace, toy_stages, invoke):
    """As `serve` will say at its start; nothing where another image serves the package."""
    few, many = (
        read(invoke, *options)["host"]["serving"]
        for options in ((), ("--set", "stages.package.preprocessing_instances=3"))
    )
    assert (few["processes"], many["processes"]) == (8, 10)
    assert few["fits"] and many["memory_bytes"] > few["memory_bytes"] > 400 << 20
    wide = read(invoke, "--set", "stages.build.max_batch_size=64")["host"]["serving"]
    assert wide["memory_bytes"] > few["memory_bytes"]  # a larger cache
    assert (
        read(invoke, "--set", "stages.package.runner=engine")["host"]["serving"]["memory_bytes"] < few["memory_bytes"]
    )
    assert read(invoke, "--set", "target.backend=llmapi")["host"]["serving"] is None
    (line,) = [line for line in invoke("plan", "small").stdout.splitlines() if "to serve the package here" in line]
    assert "its 8 processes may need" in line and "are free" in line


def test_what_is_not_timed_is_named(workplace, toy_stages, invoke):
    assert read(invoke)["host"]["not_timed"] == ["package"]
    assert "not estimated: the time of package, which" in invoke("plan", "small").stdout


def test_text(workplace, toy_stages, invoke):
    lines = [line.strip() for line in invoke("plan", "small").stdout.splitlines()]
    assert lines[0].startswith("small: ")
    assert lines[1].split() == ["convert", "will", "run", "not", "made", "yet"]
    assert any(line.startswith("weights ") for line in lines)
    assert any(line.startswith("128 tokens  x ") for line in lines)
    assert not any("does not fit" in line for line in lines)


def test_says_what_does_not_fit(workplace, toy_stages, invoke):
    text = invoke("plan", "small", "--set", "stages.build.max_blocks=100000000").stdout
    assert "does not fit" in text


@pytest.mark.parametrize("verb", ["plan", "status"])
def test_imports_nothing_heavy_and_is_quick(workplace, cpu_seconds, verb):
    script = (
        "import sys\n"
        "from pipeline.cli.main import _run\n"
        f"code = _run(['{verb}', 'small'])\n"
        "heavy = {'torch', 'transformers', 'tensorrt_rtx', 'tokenizers', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    assert cpu_seconds("-c", script) < 0.9  # beside other tests


def test_says_what_the_other_backends_would_change(workplace, toy_stages, invoke):
    worlds = read(invoke, "--set", "stages.build.max_blocks=100")["worlds"]
    assert worlds["backend"] == "tensorrt_rtx"
    others = {other["backend"]: other for other in worlds["others"]}
    assert others.keys() == {"tensorrt", "tensorrt_llm", "llmapi"}
    assert others["llmapi"]["possible"] and others["llmapi"]["loses"] == ["stages.build.max_blocks"]
    assert not others["tensorrt_llm"]["possible"]  # groups of 32
    lines = [line.strip() for line in invoke("plan", "small").stdout.splitlines()]
    assert any(line.startswith("backend tensorrt_rtx: trtseek's own network") for line in lines)
    assert any(line.startswith("tensorrt_llm cannot: the TensorRT engines of TensorRT-LLM 1.2.1") for line in lines)
    assert any(line.startswith("because ") and "groups of 32" in line for line in lines)
    assert any(line.startswith("gains no engine to be built") for line in lines)


def test_memory_of_a_backend_whose_workspace_is_its_own(workplace, toy_stages, invoke):
    options = (
        "--set",
        "target.backend=tensorrt_llm",
        "--set",
        "target.gpu=H100",
        "--set",
        "stages.quantize.method=fp8",
    )
    wide, narrow = (read(invoke, *options, "--set", f"stages.quantize.kv_cache={cache}") for cache in ("none", "fp8"))
    memory = narrow["memory"]
    assert wide["memory"]["kv_bytes_per_token"] == 2 * memory["kv_bytes_per_token"]
    left = memory["gpu_bytes"] - memory["weights_bytes"] - memory["reserve_bytes"]
    assert memory["pool_bytes"] == memory["pool_tokens"] * memory["kv_bytes_per_token"]
    assert 0.89 < memory["pool_bytes"] / left <= 0.9
    assert memory["fits"] and memory["largest"] == [{"length": 128, "batch": 2}]
    assert [row["stage"] for row in narrow["host"]["stages"]] == ["convert", "quantize", "job", "build"]
    text = invoke("plan", "small", *options).stdout
    assert "activations and workspace are TensorRT-LLM's own, and not counted" in text
    assert [row["stage"] for row in read(invoke, "--set", "target.backend=llmapi")["host"]["stages"]][-1] == "build"
