"""Triton model `postprocessing`: token ids to text."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils
from trtseek_parameters import ParameterError, check_inner_parameters
from trtseek_text import RequestError, Tokenizer, decode_batch, lighten_stub, read_flag, read_parameters, resolve_path


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lighten_stub()
        parameters = read_parameters(args)
        self.tokenizer = Tokenizer(
            resolve_path(args, parameters["tokenizer_dir"]),
            skip_special_tokens=read_flag(parameters, "skip_special_tokens"),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            check_inner_parameters(request.parameters(), "postprocessing")
            texts = decode_batch(self.tokenizer, inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"])
        except (RequestError, ParameterError) as error:
            wrong = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=wrong)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", texts)])
