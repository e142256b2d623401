"""What a user may write in a config file: frozen models whose defaults make `model` and `target` enough.

The only place where settings are declared. Values are read strictly (no "64" for 64, no `yes` for true); paths are
relative to the current folder, which for `make` is the repository's root. Composition and error messages: `load.py`.
What the types cannot say (a GPU without FP8, a group size that divides nothing): `compatibility.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from pipeline.config.backends import BACKENDS, BackendRow
from pipeline.config.gpus import GPU, find_gpu, load_gpus
from pipeline.config.package import Package
from pipeline.config.proof import Context, Continuations, Gates, HeldOut, Verify
from pipeline.config.section import FilePath, Positive, Section
from pipeline.config.settings import (
    Build,
    Calibration,
    Convert,
    GenerationProfile,
    Quantize,
)
from pipeline.errors import ConfigError
from pipeline.sharding.ranks import Parallel as Sizes

if TYPE_CHECKING:
    from pipeline.checkpoint.checked_headers import CheckedHeaders

__all__ = [
    "Build",
    "Calibration",
    "Config",
    "Context",
    "Continuations",
    "Convert",
    "Gates",
    "GenerationProfile",
    "HeldOut",
    "ModelSource",
    "Package",
    "Parallel",
    "Quantize",
    "Stages",
    "Target",
    "Verify",
]


def _name_gpu(name: str) -> str:
    try:
        return find_gpu(name).name
    except ConfigError as error:
        raise PydanticCustomError("unknown_gpu", "{problem}", {"problem": error.message, "hint": error.hint}) from error


def _list_gpus(schema: dict[str, Any]) -> None:
    schema["enum"] = list(load_gpus())


class ModelSource(Section):
    """The checkpoint to start from."""

    path: FilePath = Field(description="Folder of a Hugging Face checkpoint: config.json, safetensors, tokenizer.")


class Parallel(Section):
    """How many GPUs share one model: tensor x pipeline, a rank each; what they cannot share evenly is refused."""

    tensor: Positive = Field(
        default=1, description="Tensor parallel size: splits attention heads, MLP columns and the vocabulary."
    )
    pipeline: Positive = Field(default=1, description="Pipeline parallel size: splits decoder layers.")
    expert: Positive = Field(
        default=1,
        description="Expert parallel size, a divisor of tensor: over how many ranks of the tensor group a layer's "
        "routed experts are spread, and each one's columns over tensor / expert. EP2 is tensor: 2, expert: 2.",
    )

    @property
    def sizes(self) -> Sizes:
        """For what works by ranks. Raises CompatibilityError where `expert` does not divide `tensor`."""
        return Sizes(**self.model_dump())


class Target(Section):
    """What the engine is built for."""

    gpu: Annotated[str, AfterValidator(_name_gpu)] = Field(
        description="The GPU's name, e.g. A100-80GB; `trtseek schema` lists all that are known.",
        json_schema_extra=_list_gpus,
    )
    backend: Literal["tensorrt_rtx", "tensorrt", "tensorrt_llm", "llmapi"] = Field(
        default="tensorrt_rtx",
        description="Builder: tensorrt_rtx builds on any x86-64 host, GPU or not; tensorrt (11) on the GPU itself; "
        "tensorrt_llm: TensorRT-LLM 1.2.1's engines; llmapi: no engine, a checkpoint for TensorRT-LLM's PyTorch "
        "backend.",
    )
    parallel: Parallel = Field(default=Parallel(), description="How many GPUs share one model.")

    @property
    def device(self) -> GPU:
        """The GPU's row of the data table."""
        return find_gpu(self.gpu)

    @property
    def world(self) -> BackendRow:
        """The backend's row."""
        return BACKENDS[self.backend]


class Stages(Section):
    """Settings of each stage, in the order in which they run."""

    convert: Convert = Field(default=Convert(), description="Hugging Face to engine checkpoint.")
    quantize: Quantize = Field(default=Quantize(), description="16-bit to INT4.")
    verify: Verify = Field(default=Verify(), description="Proof and quality gates.")
    build: Build = Field(default=Build(), description="Engine limits.")
    package: Package = Field(default=Package(), description="Triton model repository.")


class Config(Section):
    """One engine: a model, a target, and what each stage does."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="Name of the output folder; the file's own name unless given."
    )
    model: ModelSource = Field(description="The checkpoint to start from.")
    target: Target = Field(description="What the engine is built for.")
    output: FilePath = Field(
        default=Path("out"), description="Results go to <output>/<name>, the store to <output>/store."
    )
    store: FilePath | None = Field(
        default=None,
        description="Where stages' results are kept, for several outputs to share; <output>/store unless given.",
    )
    stages: Stages = Field(default=Stages(), description="Settings of each stage.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _headers: CheckedHeaders | None = PrivateAttr(default=None)

    @property
    def run_folder(self) -> Path:
        """Where the results of this config appear."""
        return self.output / self.name

    @property
    def store_folder(self) -> Path:
        """Where the store is."""
        return self.store or self.output / "store"

    @property
    def headers_folder(self) -> Path:
        """Where it is remembered what of sources was checked."""
        return self.store_folder / ".headers"

    def read_headers(self) -> CheckedHeaders:
        """Of the source, which are read once: of linears that another tool has quantized that takes their scales.
        Raises CheckpointError."""
        if self._headers is None:
            from pipeline.checkpoint.checked_headers import read_checked

            self._headers = read_checked(self.model.path, self.headers_folder, self.stages.convert.dtype)
        return self._headers

    def remember_origins(self, origins: dict[str, str]) -> None:
        """Keeps `file:line` of every key, for `locate`."""
        self._origins.update(origins)

    def locate(self, key: str) -> str:
        """`key` as messages name it: with the file and line that set it, or alone where a default holds."""
        origin = self._origins.get(key)
        return f"{origin}: {key}" if origin else key

    @model_validator(mode="after")
    def _refuse_places(self) -> Self:
        if self.name in ("store", "cache", "models"):
            raise ValueError(f"name {self.name} is taken by a folder that trtseek itself keeps under output")
        if self.store is not None and self.store.resolve().is_relative_to(self.run_folder.resolve()):
            raise ValueError(f"store {self.store} is within {self.run_folder}, where the results are shown")
        return self
