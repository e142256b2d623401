"""Triton model `preprocessing`: prompts, stop and bad words to token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from trtseek_parameters import ParameterError, check_inner_parameters
from trtseek_text import (
    DRAINING,
    RequestError,
    Tokenizer,
    check_sizes,
    encode_bias,
    encode_prompts,
    encode_words,
    is_draining,
    lighten_stub,
    read_flag,
    read_parameters,
    resolve_path,
)

# Declared for the sake of TensorRT-LLM's clients, and not served: the models are text to text.
UNSERVED = ("DECODER_QUERY", "IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES")
TEXTS = ("QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lighten_stub()
        parameters = read_parameters(args)
        self.tokenizer = Tokenizer(
            resolve_path(args, parameters["tokenizer_dir"]),
            add_special_tokens=read_flag(parameters, "add_special_tokens"),
        )
        self.max_bytes = int(parameters["max_prompt_bytes"])

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        if is_draining():  # a text begins here; what comes to the models after this one has begun
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(DRAINING, pb_utils.TritonError.UNAVAILABLE))
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            check_inner_parameters(request.parameters(), "preprocessing")
            check_sizes(inputs, TEXTS, self.max_bytes)
            outputs = preprocess(self.tokenizer, inputs)
        except (RequestError, ParameterError) as error:
            wrong = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=wrong)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def preprocess(tokenizer: Tokenizer, inputs: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Input arrays by tensor name to output arrays by tensor name, the batch first. Raises RequestError."""
    if unserved := [name for name in UNSERVED if name in inputs]:
        raise RequestError(f"{', '.join(unserved)}: this model takes text only")
    ids, lengths = encode_prompts(tokenizer, inputs["QUERY"])
    batch = len(ids)
    extra = inputs.get("PROMPT_TABLE_EXTRA_ID", np.zeros((batch, 1), np.uint64))
    return {
        "INPUT_ID": ids,
        "REQUEST_INPUT_LEN": lengths,
        # A decoder-only model has no such input; an ensemble needs the tensors nevertheless.
        "DECODER_INPUT_ID": np.full((batch, 1), tokenizer.pad_id, np.int32),
        "REQUEST_DECODER_INPUT_LEN": np.ones((batch, 1), np.int32),
        "BAD_WORDS_IDS": encode_words(tokenizer, inputs.get("BAD_WORDS_DICT"), batch),
        "STOP_WORDS_IDS": encode_words(tokenizer, inputs.get("STOP_WORDS_DICT"), batch),
        "EMBEDDING_BIAS": encode_bias(
            tokenizer, inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS"), batch
        ),
        "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"].astype(np.int32),
        "OUT_END_ID": inputs.get("END_ID", np.full((batch, 1), tokenizer.end_id, np.int32)),
        "OUT_PAD_ID": inputs.get("PAD_ID", np.full((batch, 1), tokenizer.pad_id, np.int32)),
        # Ids of virtual tokens only, and text has none of them.
        "OUT_PROMPT_TABLE_EXTRA_IDS": np.where(ids >= tokenizer.vocab_size, extra, 0).astype(np.uint64),
    }
