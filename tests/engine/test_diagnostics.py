"""Against what TensorRT-RTX 1.7 really says."""

from __future__ import annotations

import pytest

from pipeline.engine.diagnostics import diagnose

LAYERS = [
    ("layers.3.attention.attention", "ATTENTION_INPUT"),
    ("layers.3.mlp.fc", "MATRIX_MULTIPLY"),
    ("layers.3.mlp.fc.quantize", "QUANTIZE"),
    ("layers.13.mlp.fc", "MATRIX_MULTIPLY"),
    ("layers.3.pool.append", "KV_CACHE_UPDATE"),
]
BUILD = "IBuilder::buildSerializedNetworkToStream: Error Code "


@pytest.mark.parametrize(
    ("error", "layers", "hint"),
    [
        (
            "1: Myelin ([myelin_graph.h:1295: attachExceptionMsgToGraph] MyelinCheckException: decompose_composite_ops."
            "cpp:59: CHECK(composite_op->is_decomposable()) failed. Attention operation was not supported by a "
            "dedicated kernel.  (See https://docs.nvidia.com/x.html for shapes and datatypes with dedicated kernels.))",
            ("layers.3.attention.attention",),
            "decomposable",
        ),
        (
            "3: API Usage Error (layers.3.attention.attention_AttentionInput: Key and Value must have the same shape In"
            " validate at /_src/optimizer/api/layers/attentionInputLayer.cpp:177)",
            ("layers.3.attention.attention",),
            "absorb",
        ),
        (
            "1: Myelin ([pass.cpp:1500: run_passes] Cannot compile for target(s) sm80, because the model contains "
            "HW-specific datatypes: fp8_e4m3. In compileGraph at /_src/optimizer/myelin/codeGenerator.cpp:2012)",
            ("layers.3.mlp.fc.quantize",),
            "SM89",
        ),
        (
            "3: API Usage Error (layers.3.pool.append: The output tensor must be a network output. In validate at "
            "/_src/optimizer/api/layers/kVCacheUpdateLayer.cpp:124)",
            ("layers.3.pool.append",),
            "network output",
        ),
        (
            "4: API Usage Error (layers.3.mlp.fc: inputs with the same operation must have same number of dimensions, "
            "but have 4 and 2 dimensions respectively. In validate at /_src/optimizer/api/layers/x.cpp:162)",
            ("layers.3.mlp.fc",),
            "",
        ),
        ("2: Internal Error (something unheard of)", (), ""),
    ],
)
def test_names_layer_and_way_out(error: str, layers: tuple[str, ...], hint: str) -> None:
    diagnosis = diagnose([BUILD + error], LAYERS)
    assert diagnosis.layers == layers
    assert hint in diagnosis.hint and bool(hint) == bool(diagnosis.hint)
    assert "/_src/" not in diagnosis.message
    assert all(layer in diagnosis.message for layer in layers)


def test_noise_and_repetitions_are_left_out() -> None:
    real = "API Usage Error (layers.13.mlp.fc: wrong. In validate at /_src/a/b.cpp:1)"
    errors = [
        "ITensor::getDimensions: Error Code 4: " + real,
        "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is "
        "insufficient for CUDA runtime version)",
        BUILD + "4: " + real,
    ]
    diagnosis = diagnose(errors, LAYERS)
    assert diagnosis.lines == (BUILD + "4: API Usage Error (layers.13.mlp.fc: wrong.)",)
    assert diagnosis.layers == ("layers.13.mlp.fc",)


def test_silence() -> None:
    assert diagnose([], LAYERS).message == "TensorRT refused the network: it gave no reason"
