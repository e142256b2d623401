"""llama.cpp in an environment of its own: a file and prompts to token ids and the logarithms of their probabilities.

    python llamacpp_child.py model.gguf '[[1, 2, 3], …]' NEW

Prints a JSON list: for each prompt, {"ids", "logprobs"} of NEW greedy tokens. Imports nothing of this project.
"""

import json
import os
import sys
from typing import Any

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints goes to stderr
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel = 512, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.warmup = params.cache_prompt = False
    params.verbosity = 2
    server = xllamacpp.Server(params)
    found = [complete(server, prompt, int(sys.argv[3])) for prompt in json.loads(sys.argv[2])]
    print(json.dumps(found), file=answers, flush=True)


def complete(server: Any, prompt: list[int], new: int) -> dict[str, Any]:
    request = {
        "prompt": prompt,
        "n_predict": new,
        "temperature": 0.0,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": False,
        "logprobs": 1,
    }
    answers: list[dict[str, Any]] = []
    server.handle_completions(request, lambda answer: answers.append(answer) or False)
    tokens = answers[-1]["choices"][0]["logprobs"]["content"]
    return {"ids": [t["id"] for t in tokens], "logprobs": [t["logprob"] for t in tokens]}


if __name__ == "__main__":
    main()
