"""Triton model `tensorrt_llm_bls`, the text path for clients. Executing requests is not part of this version.

It loads the tokenizer, so that a broken package is found when the server starts, and answers each request with an
error: the model that it would call, `tensorrt_llm`, has no executor yet.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils
from trtseek_text import Tokenizer, read_flag, read_parameters, resolve_path

REFUSAL = (
    "this version of trtseek emits and checks model repositories but does not serve them: the executor that runs "
    "requests is not part of it"
)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = read_parameters(args)
        self.tokenizer = Tokenizer(
            resolve_path(args, parameters["tokenizer_dir"]),
            add_special_tokens=read_flag(parameters, "add_special_tokens"),
            skip_special_tokens=read_flag(parameters, "skip_special_tokens"),
        )

    def execute(self, requests: list[Any]) -> None:
        """Answers each request with REFUSAL. The model is decoupled: answers go through the request's own sender."""
        for request in requests:
            sender = request.get_response_sender()
            sender.send(
                pb_utils.InferenceResponse(error=pb_utils.TritonError(REFUSAL)),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
