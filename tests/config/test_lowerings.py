"""Plugins are the default where their kernels have passed, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.compatibility import check_compatibility
from pipeline.config.load import load_config
from pipeline.config.schema import Config
from pipeline.config.settings import Lowerings
from pipeline.errors import CompatibilityError
from pipeline.stages.network import network_spec
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.checkpoint.foreign.cases import CASES
from tests.network.models import read_program
from tests.passes import LOWERINGS, fill_table

NATIVE = dict.fromkeys(LOWERINGS, "native")
Lower = Callable[..., dict[str, str]]
PASSED = ("rope_paged_kv", "paged_attention", "moe_all_to_all")


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_table(tmp_path / "passed.json", monkeypatch, lowerings=PASSED)


@pytest.fixture
def lower(tmp_path: Path) -> Lower:
    def load(
        target: dict[str, Any], lowering: dict[str, str] | None = None, quantize: dict[str, Any] | None = None
    ) -> dict[str, str]:
        stages = {} if lowering is None else {"build": {"lowering": lowering}}
        config = {"model": {"path": "m"}, "target": target, "stages": {**stages, "quantize": quantize or {}}}
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
        return load_config(tmp_path / "a.yaml").stages.build.lowering.model_dump()

    return load


def test_the_default_is_what_has_passed_on_this_sm(lower: Lower) -> None:
    attention = {"rope_paged_kv": "plugin", "paged_attention": "plugin"}
    assert lower({"gpu": "A100"}) == NATIVE | attention
    assert lower({"gpu": "A10"}) == NATIVE | attention  # SM86 runs the PTX for SM80
    assert lower({"gpu": "L4"}) == NATIVE  # has PTX of its own
    assert lower({"gpu": "A100", "backend": "tensorrt_llm"}) == NATIVE
    spread = {"gpu": "A100", "parallel": {"tensor": 2, "expert": 2}}
    assert lower(spread) == NATIVE | attention | {"moe_all_to_all": "plugin"}


def test_what_a_config_says_counts(lower: Lower) -> None:
    asked = {"paged_attention": "native", "moe_experts": "plugin"}
    assert lower({"gpu": "A100"}, asked) == NATIVE | {"rope_paged_kv": "plugin"} | asked
    assert lower({"gpu": "L4"}, asked) == NATIVE | asked


def test_an_edited_kernel_has_passed_nowhere(lower: Lower, tmp_path: Path) -> None:
    runs = json.loads((tmp_path / "passed.json").read_text())["runs"]
    runs[0]["source"] = "blake3:before"
    (tmp_path / "passed.json").write_text(json.dumps({"runs": runs}))
    assert lower({"gpu": "A100"}) == NATIVE | {"paged_attention": "plugin"}


def test_where_nothing_has_passed_all_is_native(lower: Lower, tmp_path: Path) -> None:
    (tmp_path / "passed.json").write_text('{"runs": []}')
    assert lower({"gpu": "A100"}) == NATIVE


EXPERTS = NATIVE | {"moe_experts": "plugin"}


@pytest.mark.parametrize(
    ("quantize", "chosen"),
    [
        ({"method": "awq"}, EXPERTS),
        ({"method": "none"}, EXPERTS),
        ({"method": "int8"}, NATIVE),
        ({"method": "int8", "include": ["attention_output"]}, EXPERTS),
        ({"recipe": {"rows": [{"pattern": "*.layers.3.mlp.experts.*", "method": "int8"}]}}, NATIVE),
        ({"recipe": {"rows": [{"pattern": "*.attention.dense", "method": "int8"}]}}, EXPERTS),
        # A kernel reads fc and gate as one, and multiplies their input by one vector; proj is another's.
        ({"recipe": {"rows": [{"pattern": "*.experts.*.fc", "method": "fp8"}]}}, NATIVE),
        ({"recipe": {"rows": [{"pattern": "*.experts.*.proj", "method": "fp8"}]}}, EXPERTS),
        ({"recipe": {"rows": [{"pattern": "*.experts.*.fc", "method": "awq", "group_size": 64}]}}, NATIVE),
        ({"exclude": ["*.layers.3.mlp.experts.*.gate"]}, NATIVE),
        ({"exclude": ["*.layers.3.mlp.experts.*.proj"]}, EXPERTS),
        ({"recipe": {"rows": [{"pattern": "*.experts.*.gate", "method": "rtn"}]}}, NATIVE),
        ({"method": "gptq", "recipe": {"rows": [{"pattern": "*.experts.*.gate", "method": "rtn"}]}}, EXPERTS),
        ({"recipe": {"auto": True}, "budget": {"bits_per_weight": 5}}, NATIVE),  # it may choose INT8
        ({"recipe": {"auto": True}, "sensitivity": {"formats": ["int4"]}, "budget": {"bits_per_weight": 5}}, EXPERTS),
    ],
)
def test_experts_without_a_kernel_stay_native(
    quantize: dict[str, Any], chosen: dict[str, str], lower: Lower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_table(tmp_path / "passed.json", monkeypatch, lowerings=("moe_experts",))
    assert lower({"gpu": "A100"}, quantize=quantize) == chosen


def test_ptx_that_is_tied_to_one_gpu_says_nothing_of_later_ones(
    lower: Lower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"gpu": "B200", "backend": "tensorrt"}
    for sm, chosen in ((90, NATIVE), (89, NATIVE | {"rope_paged_kv": "plugin"})):
        fill_table(tmp_path / "passed.json", monkeypatch, sm=sm, lowerings=("rope_paged_kv",))
        assert lower(target) == chosen


# Another tool's MoE, and its type -> what the experts become, and what is said where the plugin is asked for.
FOREIGN: dict[str, tuple[str | None, dict[str, str], str]] = {
    "gptq": ("float16", EXPERTS, ""),
    "modelopt-moe-fp8": (None, EXPERTS, ""),
    "compressed-int8-dynamic": (None, NATIVE, "the plugin moe_experts has no kernel for int8\n"),
    "compressed-fp8-dynamic": (None, NATIVE, "the plugin moe_experts has no kernel for fp8_rows\n"),
    # Each expert's fc and gate have vectors of their own.
    "modelopt-int4": (
        None,
        NATIVE,
        r"one input: transformer\.layers\.1\.mlp\.experts\.0\.fc and 0\.gate scale",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_experts_that_another_tool_quantized(
    name: str, tmp_path: Path, lower: Lower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is chosen is refused neither by validate nor by the network that verify writes."""
    monkeypatch.chdir(tmp_path)
    fill_table(tmp_path / "passed.json", monkeypatch, sm=89, lowerings=("moe_experts",))
    dtype, chosen, refusal = FOREIGN[name]
    hub = fixtures.deepseek_moe(tmp_path / "hub", tokenizer=True, dtype=dtype or "bfloat16", num_hidden_layers=2)
    CASES[name].write(hub, tmp_path / "m")
    assert lower({"gpu": "L40S"}, quantize={"method": "none"}) == chosen
    convert_checkpoint(
        CheckpointFolder.open(tmp_path / "m"), FolderWorkspace(tmp_path / "c"), dtype=None, overflow="refuse"
    )

    def check(*settings: str) -> Config:
        short = ("stages.build.max_seq_len=64", "stages.verify.heldout.window=64")
        config = load_config(tmp_path / "a.yaml", [*short, *settings])
        headers = config.read_headers()
        check_compatibility(config, headers.architecture, headers.tensors, headers.holding)
        return config

    def write(config: Config) -> None:
        source = CheckpointFolder.open(tmp_path / "c")
        read_program(network_spec(config, source.architecture.dtype), source.architecture, source)

    config = check()
    write(config)
    if not refusal:
        return
    with pytest.raises(CompatibilityError, match=refusal) as caught:
        check("stages.build.lowering.moe_experts=plugin")
    assert "stages.build.lowering.moe_experts: native" in caught.value.hint
    asked = config.stages.build.model_copy(update={"lowering": Lowerings(moe_experts="plugin")})
    with pytest.raises(CompatibilityError):  # not for nothing
        write(config.model_copy(update={"stages": config.stages.model_copy(update={"build": asked})}))


def test_a_model_that_cannot_be_read_is_somebody_elses_business(
    tmp_path: Path, lower: Lower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill_table(tmp_path / "passed.json", monkeypatch, lowerings=("moe_experts",))
    (tmp_path / "m").mkdir()
    for text in ("{", "[]", json.dumps({"quantization_config": {"quant_method": "gptq"}})):
        (tmp_path / "m/config.json").write_text(text)
        assert lower({"gpu": "A100"}, quantize={"method": "none"}) == EXPERTS


def test_the_source_is_read_once(tmp_path: Path, lower: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command that then checks it; not at all where no plugin hangs on it."""
    monkeypatch.chdir(tmp_path)
    fixtures.deepseek_moe(tmp_path / "hub", tokenizer=True, num_hidden_layers=2)
    CASES["compressed-int8-dynamic"].write(tmp_path / "hub", tmp_path / "m")
    lower({"gpu": "A100"}, quantize={"method": "none"})
    opened: list[Path] = []
    real = CheckpointFolder.open
    monkeypatch.setattr(CheckpointFolder, "open", lambda path: opened.append(path) or real(path))
    for lowerings, count in ((("moe_experts",), 1), (("paged_attention",), 0)):
        fill_table(tmp_path / "passed.json", monkeypatch, lowerings=lowerings)
        opened.clear()
        config = load_config(tmp_path / "a.yaml")
        assert len(opened) == count
        config.read_headers()
        config.read_headers()
        assert len(opened) == 1
