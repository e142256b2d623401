"""A process of its own for one build: `python -m tests.network.build_engine FOLDER MODEL MOE SM OUTPUT`, with
`TENSOR PIPELINE EXPERT RANK` behind that for the network of a rank.

Two profiles in one engine, a context phase and generation; only generation where experts are gathered.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.network.inputs import network_inputs
from pipeline.network.network import build_network
from pipeline.sharding import Parallel, Rank
from tests import fixtures
from tests.network import formats, models

# Wide enough for the weights of the linears to count.
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 512,
    "vocab_size": 64,
}
MODELS = {
    "llama-fp16": lambda path: models.load(fixtures.llama(path, dtype="float16", num_hidden_layers=2, head_dim=64)),
    "llama-bf16": lambda path: models.load(fixtures.llama(path, num_hidden_layers=2, head_dim=64)),
    "llama-fp32": lambda path: models.load(fixtures.llama(path, dtype="float32", num_hidden_layers=2)),
    "llama-int4": lambda path: models.load_int4(
        fixtures.llama,
        path,
        pattern=r"layers.*_proj\.weight",
        group=128,
        prescale="all",
        dtype="float16",
        num_hidden_layers=2,
        head_dim=64,
        hidden_size=256,
    ),
    "moe-bf16": lambda path: models.load(
        fixtures.deepseek_moe(path, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    ),
    "moe-int4": lambda path: models.load_int4(
        fixtures.deepseek_moe,
        path,
        pattern=r"layers.*_proj\.weight",
        group=64,
        prescale="all",
        dtype="float16",
        num_hidden_layers=2,
    ),
    "v2-fp16": lambda path: models.load(fixtures.deepseek_v2(path, dtype="float16", num_hidden_layers=2)),
    "v2-int4": lambda path: models.load_int4(
        fixtures.deepseek_v2,
        path,
        pattern=r"mlp.*_proj\.weight|o_proj",
        group=64,
        prescale="each",
        dtype="float16",
        num_hidden_layers=2,
    ),
    "v3-bf16": lambda path: models.load(fixtures.deepseek_v3(path, num_hidden_layers=2)),
    "v3-fp8": lambda path: models.load_fp8(fixtures.deepseek_v3, path, num_hidden_layers=2, hidden_size=192),
    "v3-wide-bf16": lambda path: models.load(fixtures.deepseek_v3(path, num_hidden_layers=2, **WIDE)),
    "v3-wide-fp8": lambda path: models.load_fp8(fixtures.deepseek_v3, path, num_hidden_layers=2, **WIDE),
    "v3-int4": lambda path: models.load_int4(
        fixtures.deepseek_v3, path, pattern=r"mlp.*_proj\.weight|o_proj", group=64, prescale="each", num_hidden_layers=2
    ),
    "v3-ranks-int4": lambda path: models.load_int4(
        fixtures.deepseek_v3,
        path,
        pattern=r"mlp.*_proj\.weight|o_proj",
        group=32,
        prescale="each",
        num_hidden_layers=2,
        moe_intermediate_size=128,
    ),
    "qwen2-int4": lambda path: models.load_int4(
        fixtures.qwen2,
        path,
        pattern=r"layers.*_proj\.weight",
        group=64,
        prescale="all",
        num_hidden_layers=2,
        head_dim=64,
    ),
    **{
        f"llama-{kind}": lambda path, kind=kind: formats.load(
            fixtures.llama,
            path,
            {r"layers.*_proj\.weight": kind},
            dtype="float16",
            num_hidden_layers=2,
            head_dim=64,
            hidden_size=256,
        )
        for kind in ("fp8", "fp8_rows", "int8", "int8_sq")
    },
    **{
        f"v3-stacks-{kind}": lambda path, kind=kind: formats.load(
            fixtures.deepseek_v3, path, {r"mlp.*_proj\.weight|o_proj": kind}, num_hidden_layers=2
        )
        for kind in ("fp8", "int8", "int8_sq")
    },
    "moe-fp8_rows": lambda path: formats.load(
        fixtures.deepseek_moe, path, {r"layers.*_proj\.weight": "fp8_rows"}, num_hidden_layers=2
    ),
    "moe-fp8_wide_inputs": lambda path: formats.load(
        fixtures.deepseek_moe, path, {r"layers.*_proj\.weight": "fp8_wide_inputs"}, num_hidden_layers=2
    ),
    "llama-mixed": lambda path: formats.load(
        fixtures.llama,
        path,
        {"q_proj|k_proj|v_proj": "fp8", "o_proj": "int4", "gate_proj|up_proj": "int8_sq", "down_proj": "int8"},
        dtype="float16",
        num_hidden_layers=2,
        head_dim=64,
    ),
    **{
        f"llama-head-{kind}": lambda path, kind=kind: formats.load(
            fixtures.llama,
            path,
            {r"layers.*_proj\.weight": "int4", "lm_head": kind},
            dtype="float16",
            num_hidden_layers=1,
            head_dim=64,
            hidden_size=256,
        )
        for kind in ("int4", "int8")
    },
    "v2-lite-int4": lambda path: models.load_int4(
        fixtures.deepseek_v2, path, pattern=r"mlp.*_proj\.weight|o_proj", group=64, **fixtures.V2_LITE_SHAPES
    ),
}
SMALLEST = {"T": 1, "B": 1, "Q": 1, "MB": 1, "NB": 2, "N": 1}
CONTEXT = {"T": 256, "B": 8, "Q": 128, "MB": 32, "NB": 4096, "N": 8}
GENERATION = {"T": 32, "B": 32, "Q": 1, "MB": 32, "NB": 4096, "N": 32}


def main(folder: str, name: str, moe: str, sm: str, output: str, *sizes: str) -> None:
    import tensorrt_rtx as trt

    model = MODELS[name](Path(folder))
    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    *parallel, index = map(int, sizes or (1, 1, 1, 0))
    spec = model.spec(moe=moe, rank=Rank(Parallel(*parallel), index))
    network = build_network(trt, builder.create_network(0), spec, model.architecture, model.source)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, sm), 0)
    for largest in [GENERATION] if moe == "gather" else [CONTEXT, GENERATION]:
        profile = builder.create_optimization_profile()
        for port in network_inputs(model.architecture, spec):
            profile.set_shape(port.name, *(port.resolve(sizes) for sizes in (SMALLEST, largest, largest)))
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network.network, config)
    if engine is None:
        sys.exit("TensorRT refused the network")
    Path(output).write_bytes(memoryview(engine))


if __name__ == "__main__":
    main(*sys.argv[1:])
