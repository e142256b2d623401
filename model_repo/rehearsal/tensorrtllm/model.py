"""Stands in for TensorRT-LLM's C++ backend, so that a repository made for it is rehearsed on a CPU, not a byte changed.

Triton runs this file for every model whose config says `backend: "tensorrtllm"`, once this folder's parent is named by
`--backend-directory`: `trtseek serve --rehearse` does that, and says by an environment variable which engine checkpoint
the interpreter is to run in the engine's place. The work is that of pipeline.triton.backend.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        if "c_python_backend_utils" in sys.modules:  # in a stub
            # After everything else: the interpreter's own tear-down of torch takes seconds, of Triton's exit time-out.
            atexit.register(os._exit, 0)
        from pipeline.errors import TrtseekError
        from pipeline.triton.backend.rehearsal import load_rehearsal
        from pipeline.triton.backend.service import Service

        given = json.loads(args["model_config"])["parameters"]
        parameters = {key: value["string_value"] for key, value in given.items()}
        try:
            self.service = Service(
                pb_utils,
                load_rehearsal(parameters),
                parameters,
                model=args["model_name"],
                version=args["model_version"],
                is_entry=False,
            )
        except TrtseekError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> None:
        self.service.execute(requests)

    def finalize(self) -> None:
        self.service.close()
