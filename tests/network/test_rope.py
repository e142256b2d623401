"""RoPE tables against transformers' own functions, for every kind of scaling and the hub's real numbers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.errors import CompatibilityError
from pipeline.network.rope import inverse_frequencies, rope_table, softmax_scale
from tests import fixtures

# name -> (base config, what the hub's config.json says)
LLAMAS: dict[str, dict[str, Any]] = {
    "deepseek-llm-7b": {"rope_theta": 10000.0, "max_position_embeddings": 4096, "head_dim": 128},
    "deepseek-coder-33b": {
        "rope_theta": 100000,
        "max_position_embeddings": 16384,
        "head_dim": 128,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
    },
    "dynamic": {"max_position_embeddings": 2048, "head_dim": 80, "rope_scaling": {"factor": 2.0, "type": "dynamic"}},
    "r1-distill-llama-8b": {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "yarn-without-original-length": {
        "rope_theta": 1000000.0,
        "max_position_embeddings": 4096,
        "head_dim": 64,
        "rope_scaling": {"factor": 4.0, "rope_type": "yarn"},
    },
    "yarn-with-attention-factor": {
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "head_dim": 64,
        "rope_scaling": {
            "attention_factor": 1.25,
            "beta_fast": 16,
            "beta_slow": 2,
            "factor": 8.0,
            "original_max_position_embeddings": 1024,
            "rope_type": "yarn",
        },
    },
}
V2S: dict[str, dict[str, Any]] = {
    "default": {"max_position_embeddings": 4096},
    "deepseek-v2": {
        "max_position_embeddings": 163840,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    },
    "unequal-mscale": {
        "max_position_embeddings": 16384,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    },
    "no-mscale": {
        "max_position_embeddings": 16384,
        "qk_rope_head_dim": 64,
        "rope_scaling": {"factor": 4, "original_max_position_embeddings": 4096, "type": "yarn"},
    },
}
CASES = [("llama", name) for name in LLAMAS] + [("v2", name) for name in V2S]


def _config(family: str, name: str) -> dict[str, Any]:
    return {**fixtures.LLAMA_CONFIG, **LLAMAS[name]} if family == "llama" else {**fixtures.V2_CONFIG, **V2S[name]}


def _reference(family: str, name: str) -> tuple[Any, Any]:
    """transformers' config and its rotary embedding."""
    from transformers import DeepseekV2Config, LlamaConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = {key: dict(v) if isinstance(v, dict) else v for key, v in _config(family, name).items()}
    values.pop("architectures"), values.pop("auto_map", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if family == "llama":
            config = LlamaConfig(**values)
            return config, LlamaRotaryEmbedding(config)
        config = DeepseekV2Config(**values)
        return config, DeepseekV2RotaryEmbedding(config)


def _dim(family: str, name: str) -> int:
    return int(_config(family, name)["head_dim" if family == "llama" else "qk_rope_head_dim"])


@pytest.mark.parametrize(("family", "name"), CASES)
def test_frequencies_and_scaling_are_those_of_transformers(family: str, name: str) -> None:
    architecture = parse_architecture(_config(family, name))
    _, embedding = _reference(family, name)
    frequencies, scaling = inverse_frequencies(
        architecture.rope, _dim(family, name), architecture.max_position_embeddings
    )
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(
        frequencies, embedding.inv_freq.numpy(), rtol=1.2e-7, atol=0
    )  # one unit in the last place
    assert scaling == pytest.approx(embedding.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_tables_are_those_of_transformers_to_the_last_position(family: str, name: str) -> None:
    architecture = parse_architecture(_config(family, name))
    _, embedding = _reference(family, name)
    positions = architecture.max_position_embeddings
    cos, sin = rope_table(
        architecture.rope, _dim(family, name), positions, max_position_embeddings=architecture.max_position_embeddings
    )
    some = torch.tensor([0, 1, 2, 63, 1000, positions // 2, positions - 1])
    found = embedding(torch.zeros(1), some[None])
    if family == "llama":
        expected = [part[0, :, : cos.shape[1]].numpy() for part in found]
    else:
        expected = [found.real[0].numpy(), found.imag[0].numpy()]
    # A frequency that differs by one unit in the last place turns position p by p * 6e-8 more.
    for table, reference in zip((cos, sin), expected, strict=True):
        np.testing.assert_allclose(table[some.numpy()], reference, atol=2e-7 + positions * 7e-8, rtol=0)


@pytest.mark.parametrize("name", V2S)
def test_softmax_scale_is_that_of_transformers(name: str) -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import yarn_apply_mscale

    architecture = parse_architecture(_config("v2", name))
    config, _ = _reference("v2", name)
    expected = yarn_apply_mscale(config.rope_parameters, architecture.head_dim**-0.5)
    assert softmax_scale(architecture) == pytest.approx(expected, rel=1e-12)


def test_softmax_scale_of_llama_is_plain_under_yarn() -> None:
    architecture = parse_architecture(_config("llama", "yarn-with-attention-factor"))
    assert softmax_scale(architecture) == 64**-0.5


def test_dynamic_scaling_is_refused_beyond_the_original_length() -> None:
    architecture = parse_architecture(_config("llama", "dynamic"))
    rope_table(architecture.rope, 80, 2048, max_position_embeddings=2048)
    with pytest.raises(CompatibilityError, match="beyond 2048 positions"):
        rope_table(architecture.rope, 80, 2049, max_position_embeddings=2048)
