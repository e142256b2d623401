"""Tables of the tensors in rank checkpoints; `python -m tests.engine.tensorrt_llm.golden` writes golden/ anew.

One file per architecture and method, one section per parallel sizes; ranks of equal tables share one. These were held
line by line against a description of TensorRT-LLM 1.2's checkpoints made from its sources: llama-gptq, llama-int8 and
qwen2-awq at tensor 2; deepseek_moe-fp8 at tensor 1, tensor 2 and pipeline 2; deepseek_moe-plain at tensor 4 expert 2;
llama-plain at tensor 2 pipeline 2. llama-plain, -fp8, -awq, -w4a8 and -smoothquant were also held against what modelopt
writes (benchmarks/rank_peer.py). The others are as the writer made them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open

from pipeline.checkpoint.folder import CheckpointFolder
from tests.engine.tensorrt_llm.rank_cases import METHODS, make_engine, write

FOLDER = Path(__file__).parent / "golden"
SIZES = ({"tensor": 1}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2})
EXPERT_SIZES = (*SIZES, {"tensor": 2, "expert": 2}, {"tensor": 4, "expert": 2})
CASES = {
    **{f"{architecture}-{method}": SIZES for architecture in ("llama", "qwen2") for method in METHODS},
    "deepseek_moe-plain": EXPERT_SIZES,
    "deepseek_moe-fp8": SIZES,
}


def describe(engine: CheckpointFolder, parallel: Sequence[Mapping[str, int]], folder: Path) -> str:
    """The text of one golden file; ranks are written into `folder`."""
    lines: list[str] = []
    for sizes in parallel:
        name = " ".join(f"{key} {value}" for key, value in sizes.items())
        output = folder / name.replace(" ", "_")
        report = write(engine, output, **sizes)
        lines += [f"== {name}: {report.quant_algo or '16 bits'}", *_list_ranks(output)]
    return "\n".join(lines) + "\n"


def _list_ranks(folder: Path) -> Iterator[str]:
    tables: dict[str, list[int]] = {}
    for rank in range(len(list(folder.glob("rank*.safetensors")))):
        # The safetensors library's own view of the file.
        with safe_open(folder / f"rank{rank}.safetensors", "pt") as file:
            rows = [(name, file.get_slice(name)) for name in sorted(file.keys())]
            text = "\n".join(f"{part.get_dtype():8}{part.get_shape()!s:16}{name}" for name, part in rows)
        tables.setdefault(text, []).append(rank)
    for text, ranks in tables.items():
        yield f"-- rank {', '.join(map(str, ranks))}"
        yield text


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case, parallel in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(Path(folder), *case.split("-"))
            (FOLDER / f"{case}.txt").write_text(describe(engine, parallel, Path(folder)), encoding="utf-8")
        print(case, flush=True)


if __name__ == "__main__":
    main()
