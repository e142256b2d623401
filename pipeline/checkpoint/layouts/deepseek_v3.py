"""DeepSeek-V3, R1 and V3.1: V2's rows, a correction bias of the router, and the multi-token prediction (MTP) layer.

The MTP layer (arXiv 2412.19437 §2.2) stands on the hub as one more decoder layer, number num_hidden_layers, with an
embedding, two norms, a projection and a head of its own. It is stored under `transformer.mtp_layers.0.`, so that
nothing takes it for a layer of the decoder, and its role is "mtp" throughout: converted and exported, never quantized,
no part of the network. Examples: DeepSeek-V3 (61 layers, hidden 7168, 256 experts of 2048, 1 shared).

FP8 weights and their scales by block need no rows: see checkpoint/block_scales.py.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.checkpoint.layouts import deepseek, deepseek_v2, llama
from pipeline.checkpoint.layouts.deepseek_v2 import UNUSED, list_dimensions
from pipeline.checkpoint.layouts.llama import LAYERS, SOURCE_LAYERS
from pipeline.checkpoint.layouts.rows import DENSE, LAYER, MTP_PREFIX, ROUTED, Row, linear, vector

__all__ = ["ROWS", "UNUSED", "list_dimensions"]

MTP_LAYERS = MTP_PREFIX + "{m}."
CORRECTION_BIAS: list[Row] = vector(
    # model.layers.3.mlp.gate.e_score_correction_bias [256], float32, and so it stays: sums of it and a sigmoid are
    # ranked, and half of 16 bits' steps would exchange experts
    #   -> transformer.layers.3.mlp.router.e_score_correction_bias
    LAYERS + "mlp.router.e_score_correction_bias",
    SOURCE_LAYERS + "mlp.gate.e_score_correction_bias",
    "experts",
    role="router",
    where=ROUTED,
    cast=False,
)
DECODER_LAYER: list[Row] = [
    *llama.INPUT_NORM,
    *deepseek_v2.ATTENTION,
    *llama.POST_NORM,
    *llama.mlp(LAYERS + "mlp", SOURCE_LAYERS + "mlp", "intermediate", role="mlp", where=DENSE, bias="mlp_bias"),
    *CORRECTION_BIAS,
    *deepseek.ROUTED_MLP,
]
BEFORE: list[Row] = [
    # model.layers.61.embed_tokens.weight [129280, 7168] -> transformer.mtp_layers.0.vocab_embedding.weight; a copy of
    # the model's own, which some repositories leave out, as they do shared_head.head, a copy of lm_head
    *linear(LAYERS + "vocab_embedding", [SOURCE_LAYERS + "embed_tokens"], ["vocab"], "hidden", role="mtp"),
    # model.layers.61.enorm.weight [7168] -> transformer.mtp_layers.0.enorm.weight, likewise hnorm
    *vector(LAYERS + "enorm.weight", SOURCE_LAYERS + "enorm.weight", "hidden", role="mtp", where=LAYER),
    *vector(LAYERS + "hnorm.weight", SOURCE_LAYERS + "hnorm.weight", "hidden", role="mtp", where=LAYER),
    # model.layers.61.eh_proj.weight [7168, 14336] -> transformer.mtp_layers.0.eh_proj.weight
    *linear(LAYERS + "eh_proj", [SOURCE_LAYERS + "eh_proj"], ["hidden"], "hidden_twice", role="mtp"),
]
AFTER: list[Row] = [
    *vector(
        LAYERS + "shared_head.norm.weight", SOURCE_LAYERS + "shared_head.norm.weight", "hidden", role="mtp", where=LAYER
    ),
    *linear(LAYERS + "shared_head.head", [SOURCE_LAYERS + "shared_head.head"], ["vocab"], "hidden", role="mtp"),
]
COPIES = ("vocab_embedding.weight", "shared_head.head.weight")
MTP: list[Row] = [
    replace(
        row,
        target=row.target.replace(LAYERS, MTP_LAYERS),
        role="mtp",
        mtp=True,
        optional=row.target.removeprefix(LAYERS) in COPIES,
    )
    for row in (*BEFORE, *DECODER_LAYER, *AFTER)
]
ROWS: tuple[Row, ...] = (*llama.EMBEDDING, *DECODER_LAYER, *llama.HEAD, *MTP)
