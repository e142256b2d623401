"""llama.cpp as a peer: a child process in an environment of its own that answers commands, one JSON object a line.

    out/peers/xllamacpp/bin/python benchmarks/peers/llamacpp.py model.gguf THREADS SLOTS

{"prompts": [[token ids] …], "new": n} → {"texts", "prefill_s", "decode_s", "decode_tokens", "cpu_s"}. Imports nothing
of this project: its environment has xllamacpp only. Prefill lasts until the last request has its first token; decoding
from there until the first request ends.
"""

import json
import os
import sys
import threading
import time
from typing import Any

import xllamacpp  # type: ignore[import-not-found]

Arrivals = list[tuple[float, str]]


def start(path: str, threads: int, slots: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = slots
    params.n_ctx = 1024 * slots
    params.n_batch = params.n_ubatch = 512
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.warmup = True
    params.verbosity = -1
    params.sampling.no_perf = True
    return xllamacpp.Server(params)


def complete(server: Any, prompt: list[int], new: int, arrivals: Arrivals) -> None:
    request = {
        "prompt": prompt,
        "n_predict": new,
        "temperature": 0.0,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }

    def receive(chunk: dict[str, Any]) -> bool:
        if "choices" not in chunk:
            raise RuntimeError(f"llama.cpp answered {chunk}")
        choice = chunk["choices"][0]
        if choice["finish_reason"] is None:
            arrivals.append((time.perf_counter(), choice["text"]))
        return False

    server.handle_completions(request, receive)


def run(server: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    arrivals: list[Arrivals] = [[] for _ in prompts]
    workers = [
        threading.Thread(target=complete, args=(server, prompt, new, times))
        for prompt, times in zip(prompts, arrivals, strict=True)
    ]
    started, used = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    used = time.process_time() - used
    # Requests do not start and end together: what counts is the time in which all of them generate.
    begin, end = max(times[0][0] for times in arrivals), min(times[-1][0] for times in arrivals)
    tokens = sum(begin < moment <= end for times in arrivals for moment, _ in times)
    return {
        "texts": ["".join(text for _, text in times) for times in arrivals],
        "prefill_s": begin - started,
        "decode_s": end - begin,
        "decode_tokens": tokens,
        "cpu_s": used,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints goes to stderr
    server = start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"ready": xllamacpp.get_system_info()}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(run(server, command["prompts"], command["new"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
