"""What every peer's script does around its own quantizer: the clock, the peak, and floats for the interpreter.

Imported from the script's own folder, in the peer's environment. Never imports the project.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def run(
    quantize: Callable[[Path, torch.Tensor, int, Path], None],
    read_back: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> None:
    """`quantize(model folder, tokens [N, T], group, output folder)` is timed; `read_back` makes floats of the tensors
    that it wrote. Prints seconds, processor seconds and peak resident bytes."""
    source, token_file, output, group = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    tokens = torch.tensor(json.loads(token_file.read_text()))
    began, processor = time.perf_counter(), time.process_time()
    quantize(source, tokens, group, output / "export")
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    stored = {n: t for file in sorted((output / "export").glob("*.safetensors")) for n, t in load_file(file).items()}
    floats = {name: tensor.float().contiguous() for name, tensor in read_back(stored).items()}
    (output / "floats").mkdir(parents=True)
    save_file(floats, output / "floats" / "model.safetensors", metadata={"format": "pt"})
    print(json.dumps({"seconds": seconds, "processor": processor, "peak": int(found[1]) * 1024}))
