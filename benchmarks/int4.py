"""INT4 on the CPU: the interpreter in fast mode against transformers (16-bit, eager) and llama.cpp (Q4_0).

    python -m benchmarks.int4            # exit status 1 where a bar is missed

A Llama of 254M random weights. All sides take their weights from the same bf16 tensors, each rounded to its own 4-bit
format: INT4 in groups of 128 here, Q4_0 (groups of 32) there. The head is INT8 here and Q8_0 there, or bf16 on both
sides (`--head BF16`), and bf16 in transformers, or fp32 where the processor is slow in bf16; the embedding, of which a
token reads one row, is as the head there and bf16 here. Prompts are the same tokens; what is generated differs, which
costs nothing. Decoding is timed from the moment every sequence has its first token, prefill up to the first token.

llama.cpp comes from PyPI's prebuilt wheel in an environment of its own, out/peers/xllamacpp, made when missing. The
three take turns, round after round, with equal threads; a round's ratio is held against the bar by its median, and CPU
seconds, which other load disturbs less, are printed beside.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch is imported: spinning threads starve each other here
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the server's processes have it

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import interpreter as llama
from pipeline.runtime.runner import InterpreterRunner
from pipeline.runtime.steps import Chunk, plan_step

XLLAMACPP = "xllamacpp==2026.10.11549"
CONFIG: dict[str, Any] = {
    **llama.CONFIG,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
SLOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is timed, and by how much the interpreter must be faster than each peer."""

    name: str
    batch: int
    prompt: int
    new: int
    bars: Mapping[str, float]

    @property
    def is_prefill(self) -> bool:
        return self.new == 1

    def draw_prompts(self) -> list[list[int]]:
        draw = torch.Generator().manual_seed(self.batch)
        return torch.randint(3, CONFIG["vocab_size"], (self.batch, self.prompt), generator=draw).tolist()


CASES = (
    Case(name="decode", batch=1, prompt=32, new=48, bars={"transformers": 3.0, "llama.cpp": 0.8}),
    Case(name="decode", batch=8, prompt=32, new=24, bars={"llama.cpp": 1.2}),
    Case(name="prefill", batch=1, prompt=384, new=1, bars={"llama.cpp": 2.0}),
)
Rates = tuple[float, float, float]  # tokens per second of prefill, of decoding; CPU seconds in all
Side = Callable[[list[list[int]], int], Rates]


def rates(prompts: list[list[int]], marks: list[float], cpu: float) -> Rates:
    """marks: the start, and when each token of all sequences was there."""
    decoded = len(prompts) * (len(marks) - 2)
    prefill = sum(map(len, prompts)) / (marks[1] - marks[0])
    return prefill, decoded / (marks[-1] - marks[1]) if decoded else 0.0, cpu


def run_interpreter(runner: InterpreterRunner) -> Side:
    def run(prompts: list[list[int]], new: int) -> Rates:
        size = llama.BLOCK_SIZE
        blocks = -(-(len(prompts[0]) + new) // size)
        tables = [range(1 + i * blocks, 1 + (i + 1) * blocks) for i in range(len(prompts))]
        runner.allocate(1 + blocks * len(prompts))
        marks = [time.perf_counter()]
        used, tokens, start = time.process_time(), prompts, 0
        for _ in range(new):
            chunks = [Chunk(tokens=t, start=start, block_table=b) for t, b in zip(tokens, tables, strict=True)]
            plan = plan_step(chunks, block_size=size, num_blocks=1 + blocks * len(prompts))
            best = runner.step(plan.inputs).argmax(dim=-1).tolist()
            start += len(tokens[0])
            tokens = [[token] for token in best]
            marks.append(time.perf_counter())
        return rates(prompts, marks, time.process_time() - used)

    return run


def run_transformers(model: Any) -> Side:
    from transformers import DynamicCache

    def run(prompts: list[list[int]], new: int) -> Rates:
        with torch.inference_mode():
            marks = [time.perf_counter()]
            used, cache, ids = time.process_time(), DynamicCache(config=model.config), torch.tensor(prompts)
            for _ in range(new):
                logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
                ids = logits[:, -1].argmax(dim=-1, keepdim=True)
                marks.append(time.perf_counter())
            return rates(prompts, marks, time.process_time() - used)

    return run


class LlamaCpp:
    """The peer process of peers/llamacpp.py, which loads the file and then answers."""

    def __init__(self, model: Path, environment: Path, threads: int) -> None:
        script = Path(__file__).parent / "peers" / "llamacpp.py"
        command = [str(environment / "bin" / "python"), str(script), str(model), str(threads), str(SLOTS)]
        with (model.parent / "llamacpp.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.system = self._answer()["ready"]

    def __call__(self, prompts: list[list[int]], new: int) -> Rates:
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "new": new}), file=self.process.stdin, flush=True)
        answer = self._answer()
        prefill = sum(map(len, prompts)) / answer["prefill_s"]
        decode = answer["decode_tokens"] / answer["decode_s"] if answer["decode_tokens"] else 0.0
        return prefill, decode, answer["cpu_s"]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {self.process.wait()}; see llamacpp.log beside the model")
        answer: dict[str, Any] = json.loads(line)
        return answer


def install_peer(environment: Path) -> None:
    if not (environment / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", XLLAMACPP]
        subprocess.run(pip, check=True)


def measure(case: Case, sides: Mapping[str, Side], rounds: int) -> dict[str, Any]:
    prompts = case.draw_prompts()
    results: dict[str, list[Rates]] = {name: [] for name in sides}
    for side in sides.values():
        side(prompts, min(case.new, 4))  # warm up
    for _ in range(rounds):
        for name, side in sides.items():
            results[name].append(side(prompts, case.new))
    part = 0 if case.is_prefill else 1
    ours = results["interpreter"]
    ratios = {
        name: statistics.median(mine[part] / theirs[part] for theirs, mine in zip(times, ours, strict=True))
        for name, times in results.items()
        if name != "interpreter"
    }
    return {
        "case": case.name,
        "batch": case.batch,
        "tokens_per_s": {name: round(max(t[part] for t in times), 1) for name, times in results.items()},
        "cpu_s": {name: round(min(t[2] for t in times), 2) for name, times in results.items()},
        "ratio": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "bar": dict(case.bars),
        "met": all(ratios[name] >= bar for name, bar in case.bars.items()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--head", default="Q8_0", choices=("Q8_0", "BF16"), help="INT8 here and Q8_0 there, or bf16")
    parser.add_argument("--peers", type=Path, default=Path("out/peers"), help="where environments and files go")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each side")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    from benchmarks.gguf_file import write_gguf

    install_peer(options.peers / "xllamacpp")
    model = llama.build_model(CONFIG)
    file = options.peers / f"llama-250m-{options.head}.gguf"
    write_gguf(file, model.state_dict(), CONFIG, linears="Q4_0", head=options.head)
    program = llama.read_program(model, CONFIG, int4=True, int8_head=options.head == "Q8_0")
    runner = InterpreterRunner(program, mode="fast")
    peer = LlamaCpp(file, options.peers / "xllamacpp", options.threads)
    sides: dict[str, Side] = {
        "interpreter": run_interpreter(runner),
        "transformers": run_transformers(llama.widen_where_slow(model)),
        "llama.cpp": peer,
    }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    setting = {"parameters": parameters, "threads": options.threads, "transformers_dtype": str(model.dtype)}
    print(json.dumps({**setting, "llama.cpp": peer.system}))
    try:
        met = True
        for case in CASES:
            result = measure(case, sides, options.rounds)
            met = met and result["met"]
            print(json.dumps(result), flush=True)
    finally:
        peer.close()
        file.unlink()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
