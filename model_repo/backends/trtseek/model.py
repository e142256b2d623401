"""Triton backend `trtseek`, in Python: in-flight batching over paged KV for the engine it is given.

Triton runs this file for every model whose config says `backend: "trtseek"`, once this folder's parent is named by
`--backend-directory`, or this folder stands among Triton's own backends. It needs the package trtseek in the Python
that the stub embeds (`pip install trtseek`; `trtseek serve` sees to it). The work is that of pipeline.triton.backend.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        if "c_python_backend_utils" in sys.modules:  # in a stub
            # After everything else: the interpreter's own tear-down of torch takes seconds, of Triton's exit time-out.
            atexit.register(os._exit, 0)
        try:
            from pipeline.errors import TrtseekError
            from pipeline.triton.backend.loading import load_model
            from pipeline.triton.backend.service import Service
        except ImportError as error:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise pb_utils.TritonModelException(
                f"{error}: the backend trtseek needs the package of that name in Triton's Python {version} at "
                f"{sys.prefix}: install it there with pip, or start the server with `trtseek serve`"
            ) from error
        given = json.loads(args["model_config"]).get("parameters", {})
        parameters = {key: value["string_value"] for key, value in given.items()}
        folder = Path(args["model_repository"])
        if folder.name != args["model_name"]:
            folder = folder / args["model_name"]
        try:
            self.service = Service(
                pb_utils,
                load_model(folder, parameters),
                parameters,
                model=args["model_name"],
                version=args["model_version"],
            )
        except TrtseekError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> None:
        self.service.execute(requests)

    def finalize(self) -> None:
        self.service.close()
