"""Slices give what the whole gives, in memory that does not grow with the number of layers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.evaluation.forward import run_network
from pipeline.evaluation.measurement import plan_schedule
from pipeline.evaluation.schedule import TokenSequence
from pipeline.network.spec import NetworkSpec
from tests import fixtures
from tests.evaluation.support import convert

WATCH = """
import gc, re, sys
from pathlib import Path
from pipeline.evaluation.forward import run_network
from pipeline.evaluation.measurement import plan_schedule
from pipeline.evaluation.schedule import TokenSequence
from pipeline.evaluation.subject import open_subject
from pipeline.network.spec import NetworkSpec

gc.disable()  # a layer is let go when it is done, not when the collector comes
subject = open_subject(Path(sys.argv[1]))
layers = subject.architecture.num_layers
schedule = plan_schedule([TokenSequence(tokens=tuple(range(16)))], subject.architecture, block_size=16)
spec = NetworkSpec(dtype=subject.dtype, max_seq_len=16, block_size=16)
events = run_network(subject.source, subject.architecture, spec, schedule.steps, num_blocks=schedule.num_blocks,
                     mode="exact", segments=[(layer, layer + 1) for layer in range(layers)])
for event in events:
    status = Path("/proc/self/status").read_text()
    print(sum(int(re.search(rf"{key}:\\s+(\\d+)", status)[1]) for key in ("RssAnon", "RssFile")))
"""


def events(engine: CheckpointFolder, segments: list[tuple[int, int]]) -> dict[tuple[int, int | None], torch.Tensor]:
    schedule = plan_schedule([TokenSequence(tokens=tuple(range(9)))], engine.architecture, block_size=4, chunk=4)
    spec = NetworkSpec(dtype="float32", max_seq_len=16, block_size=4)
    run = run_network(
        engine,
        engine.architecture,
        spec,
        schedule.steps,
        num_blocks=schedule.num_blocks,
        mode="exact",
        segments=segments,
    )
    return {(event.step, event.layer): event.rows.clone() for event in run}


def test_slices_give_what_the_whole_network_gives(tmp_path: Path) -> None:
    engine = convert(fixtures.deepseek_v2(tmp_path / "hf"), tmp_path / "engine")
    whole, sliced = events(engine, [(0, 3)]), events(engine, [(0, 1), (1, 3)])
    assert whole.keys() == sliced.keys() == {(step, layer) for step in range(3) for layer in (0, 1, 2, None)}
    for key, rows in whole.items():
        assert torch.equal(rows, sliced[key]), key


def test_memory_is_one_layers_however_many_there_are(tmp_path: Path) -> None:
    layers = 8
    path = fixtures.llama(tmp_path / "hf", num_hidden_layers=layers, hidden_size=512, intermediate_size=2048, shards=1)
    watched = subprocess.run([sys.executable, "-c", WATCH, str(path)], capture_output=True, text=True, check=True)
    kilobytes = [int(line) for line in re.findall(r"^\d+$", watched.stdout, re.MULTILINE)]
    assert len(kilobytes) == layers + 1
    # A layer has 7.7 MB in bfloat16 and 15.4 MB as the interpreter holds it: six more of them would be 140 MB.
    assert max(kilobytes[2:]) - kilobytes[1] < 40_000, kilobytes
