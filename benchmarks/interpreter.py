"""Interpreter against transformers: greedy generation of a ~100M Llama of random weights, bf16, on the CPU; in
transformers the same numbers in fp32 where the processor multiplies bf16 many times as slowly (no AVX-512).

    python -m benchmarks.interpreter            # exit status 1 where a bar is missed
    python -m benchmarks.interpreter --int4     # the same model's linears in INT4, mode "fast", still against bf16

Both sides run the same weights and prompts in one process, round after round in turn, so that a machine's other load
meets both; a round's ratio is transformers' time over the interpreter's, and the median over the rounds is held against
the bar. transformers gets the leanest loop it allows (a DynamicCache, the last position's logits only, prompts of one
length, so no padding), the interpreter goes through the paged runner as a server would use it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.interpreter.numerics import Mode, multiplied_as
from pipeline.network.program import Program
from pipeline.quantization import int8
from pipeline.quantization.int4 import pack, quantize
from pipeline.runtime.generation import generate
from pipeline.runtime.runner import InterpreterRunner

BLOCK_SIZE = 64
BARS = {"bf16": {1: 1.0, 8: 1.2}, "int4": {1: 1.0, 8: 1.0}}  # batch -> lowest ratio
GROUP = 128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "vocab_size": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


class EngineWeights:
    """A hub state dict under the engine checkpoint's names, in memory; with `int4`, the layers' linears rounded, with
    `int8_head`, the head."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, int4: bool, int8_head: bool
    ) -> None:
        self._raw: dict[str, RawTensor] = {}
        for mapping in layout_for(parse_architecture(config)).mappings():
            if mapping.optional and mapping.sources[0] not in state:
                continue
            target = mapping.forward([state[name] for name in mapping.sources])
            if int4 and mapping.layer is not None and target.dim() == 2:
                q, scales = quantize(target, GROUP)
                self._raw[mapping.target] = RawTensor.from_torch(pack(q))
                scale_name = mapping.target.removesuffix("weight") + "weights_scaling_factor"
                self._raw[scale_name] = RawTensor.from_torch(scales.float())
            elif int8_head and mapping.role == "head":
                q, scales = int8.quantize(target)
                self._raw[mapping.target] = RawTensor.from_torch(q)
                self._raw["lm_head.per_channel_scale"] = RawTensor.from_torch(scales)
            else:
                self._raw[mapping.target] = RawTensor.from_torch(target)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(name, raw.dtype, raw.shape) for name, raw in self._raw.items()}

    def read(self, name: str) -> RawTensor:
        return self._raw[name]


def build_model(values: Mapping[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{key: value for key, value in values.items() if key not in ("architectures", "torch_dtype")})
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def read_program(model: Any, config: Mapping[str, Any], *, int4: bool, int8_head: bool = False) -> Program:
    import tensorrt_rtx as trt

    from pipeline.network.network import NetworkSpec, build_network
    from pipeline.network.readback import read_network

    spec = NetworkSpec(dtype="bfloat16", block_size=BLOCK_SIZE, max_seq_len=config["max_position_embeddings"])
    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)
    source = EngineWeights(model.state_dict(), config, int4=int4, int8_head=int8_head)
    return read_network(build_network(trt, network, spec, parse_architecture(config), source))


def widen_where_slow(model: Any) -> Any:
    """As a user of transformers would run it on this processor. Its program is read before: that is of 16 bits."""
    return model.to(multiplied_as(model.dtype))


def generate_transformers(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """`generate` without its bookkeeping: a cache and argmax."""
    from transformers import DynamicCache

    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        ids = torch.tensor(prompts)
        steps = []
        for _ in range(new_tokens):
            logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            steps.append(ids)
        return torch.cat(steps, dim=1).tolist()


def clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--attention", default="eager", choices=("eager", "sdpa"), help="transformers' attention")
    parser.add_argument("--int4", action="store_true")
    options = parser.parse_args()

    model = build_model(CONFIG)
    model.set_attn_implementation(options.attention)
    mode: Mode = "fast" if options.int4 else "declared"
    runner = InterpreterRunner(read_program(model, CONFIG, int4=options.int4), mode=mode)
    widen_where_slow(model)
    missed = False
    for batch, bar in BARS["int4" if options.int4 else "bf16"].items():
        draw = torch.Generator().manual_seed(batch)
        prompts = torch.randint(CONFIG["vocab_size"], (batch, options.prompt), generator=draw).tolist()

        def ours(prompts: list[list[int]] = prompts) -> object:
            return generate(runner, prompts, options.new, block_size=BLOCK_SIZE)

        def theirs(prompts: list[list[int]] = prompts) -> object:
            return generate_transformers(model, prompts, options.new)

        clock(ours), clock(theirs)  # warm up
        rounds = [(clock(ours), clock(theirs)) for _ in range(options.rounds)]
        ratio = statistics.median(b / a for a, b in rounds)
        tokens = batch * options.new
        missed = missed or ratio < bar
        line = {
            "interpreter": "int4 fast" if options.int4 else "bf16 declared",
            "batch": batch,
            "prompt": options.prompt,
            "new": options.new,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "threads": torch.get_num_threads(),
            "transformers_attention": options.attention,
            "transformers_dtype": str(model.dtype),
            "interpreter_tokens_per_s": round(tokens / min(a for a, _ in rounds), 1),
            "transformers_tokens_per_s": round(tokens / min(b for _, b in rounds), 1),
            "ratio": round(ratio, 2),
            "bar": bar,
        }
        print(json.dumps(line))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
