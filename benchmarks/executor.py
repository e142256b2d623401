"""What the executor costs beside the network: CPU microseconds of one step and of each token, with a runner that
computes nothing. One thread.

    python -m benchmarks.executor
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.idle import IdleRunner
from pipeline.runtime.executor import Executor
from pipeline.runtime.limits import Limits
from pipeline.runtime.request import Request
from pipeline.runtime.sampling import Sampling

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_p 0.9": {"top_p": 0.9},
    "temperature": {"top_p": 1.0},
    "repetition penalty": {"repetition_penalty": 1.1},
}
PROMPT, ANSWER = 200, 50


def measure(vocabulary: int, batch: int, sampling: dict[str, Any]) -> float:
    """CPU seconds of one step of `batch` streaming requests that generate."""
    limits = Limits(num_blocks=2000, block_size=64, max_seq_len=1024, max_batch_size=batch, max_num_tokens=256 * batch)
    executor = Executor(IdleRunner(vocabulary), limits, vocab_size=vocabulary)
    for n in range(batch):
        prompt = tuple(range(n, n + PROMPT))
        request = Request(input_ids=prompt, max_tokens=ANSWER, sampling=Sampling(seed=n, **sampling), streaming=True)
        executor.submit(request, lambda update: None)
    executor.step()  # the prompts
    start = time.process_time()
    steps = 0
    while executor.step():
        steps += 1
    return (time.process_time() - start) / steps


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'vocabulary':>10} {'batch':>6} {'sampling':20} {'us/step':>9} {'us/token':>9}")
    for vocabulary in (512, 49152):
        for batch in (1, 16, 64):
            for name, sampling in SAMPLINGS.items():
                seconds = min(measure(vocabulary, batch, sampling) for _ in range(3))
                print(
                    f"{vocabulary:10} {batch:6} {name:20} {seconds * 1e6:9.0f} {seconds / batch * 1e6:9.1f}", flush=True
                )


if __name__ == "__main__":
    main()
