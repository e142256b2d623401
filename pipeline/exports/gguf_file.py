"""A GGUF file, which llama.cpp runs: the header by the gguf library, then every tensor as a stream, one of them (of a
stack of experts, one expert) in memory.
"""

from __future__ import annotations

import os
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import CompatibilityError
from pipeline.exports.ggml_blocks import row_bytes
from pipeline.exports.gguf_metadata import ROPE_FACTORS, add_architecture, rope_factors
from pipeline.exports.gguf_names import name_architecture
from pipeline.exports.gguf_tensors import GgufTensor, list_tensors, plan_tensors
from pipeline.exports.gguf_tokenizer import add_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.exports.plan import Plan
    from pipeline.progress import Progress

FILE = "model.gguf"
ALIGNMENT = 32  # GGUF's own, unless a file says otherwise
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q8_0": 7}  # gguf.LlamaFileType


def write_gguf(engine: CheckpointFolder, folder: Path, *, others: str, progress: Progress) -> tuple[Plan, list[str]]:
    """Writes model.gguf into `folder`. Returns what became of the linears, and what a user must know.

    Raises CheckpointError and CompatibilityError, also where the gguf library is not installed."""
    try:
        from gguf import GGUFWriter
    except ModuleNotFoundError as error:
        raise CompatibilityError(
            "GGUF is written with the gguf library, which is not installed", hint="pip install 'trtseek[exports]'"
        ) from error
    name = name_architecture(engine.architecture)
    plan = plan_tensors(engine, others)
    tensors = list_tensors(plan)
    writer = GGUFWriter(folder / FILE, name)
    notes = [*add_architecture(writer, engine.architecture), *add_tokenizer(writer, engine)]
    kinds = {tensor.kind for tensor in tensors}
    main = next(kind for kind in ("Q4_0", "Q8_0", "BF16", "F16", "F32") if kind in kinds)
    writer.add_file_type(FILE_TYPES[main])
    if main in ("Q4_0", "Q8_0"):
        writer.add_quantization_version(2)
    if (factors := rope_factors(engine.architecture)) is not None:
        tensors.append(
            GgufTensor(name=ROPE_FACTORS, kind="F32", shape=factors.shape, pieces=[lambda: factors.view(np.uint8)])
        )
    _write_header(writer, tensors)
    _append(folder / FILE, tensors, engine, progress)
    return plan, notes


def _write_header(writer: GGUFWriter, tensors: list[GgufTensor]) -> None:
    from gguf import GGMLQuantizationType

    for tensor in tensors:
        shape = (*tensor.shape[:-1], row_bytes(tensor.kind, tensor.shape[-1]))
        kind = GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _append(path: Path, tensors: list[GgufTensor], engine: CheckpointFolder, progress: Progress) -> None:
    progress.start("writing", sum(tensor.nbytes for tensor in tensors), "B")
    with open(path, "ab") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            written = 0
            for piece, source in zip_longest(tensor.pieces, tensor.sources):
                data = np.ascontiguousarray(piece())
                file.write(data.data)
                written += data.nbytes
                progress.advance(data.nbytes)
                if source is not None:
                    engine.release(source)
            if written != tensor.nbytes:
                raise ValueError(f"{tensor.name}: {written} bytes written, {tensor.nbytes} declared")
        file.write(bytes(-file.tell() % ALIGNMENT))
        file.flush()
        os.fsync(file.fileno())
