"""What emitting a model repository takes in every flavour: the models' folders, and links to what they need."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.digest import digest_file, digest_json
from pipeline.errors import PackageError
from pipeline.progress import Progress
from pipeline.triton import MODEL_REPO
from pipeline.triton.model_config import print_config

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import CheckpointFolder

REPOSITORY, BACKENDS, ARTIFACTS = "model_repository", "backends", "artifacts"
VERSION = "1"
# Errors of os.link that mean "not here": another file system, one without hard links, too many of them.
NOT_LINKABLE = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP)
# A model's own code, and the modules that it imports, in its version folder: name there -> file in model_repo/.
Modules = Mapping[str, Mapping[str, str]]


# The forms of the module by which `tensorrt_llm_bls` asks `tensorrt_llm`: a socket, which our backend listens at, or
# Triton itself.
BY_SOCKET = {"trtseek_child.py": "trtseek_child.py", "trtseek_wire.py": "trtseek_wire.py"}
BY_TRITON = {"trtseek_child.py": "trtseek_child_bls.py"}


def list_modules(child: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    """The code of each model that has its own. `child`: BY_SOCKET or BY_TRITON."""
    text = {name: name for name in ("trtseek_text.py", "trtseek_parameters.py")}
    answers = {name: name for name in ("trtseek_chat.py", "trtseek_stream.py", "trtseek_answer.py")}
    modules = {"preprocessing": text, "postprocessing": text, "tensorrt_llm_bls": {**text, **answers, **child}}
    return {model: {"model.py": f"{model}/{VERSION}/model.py", **others} for model, others in modules.items()}


def write_models(repository: Path, configs: Mapping[str, Any], modules: Modules) -> None:
    """A folder for each model: config.pbtxt, and the code that it has."""
    for model, config in configs.items():
        version = repository / model / VERSION
        version.mkdir(parents=True)
        (repository / model / "config.pbtxt").write_text(print_config(config), encoding="utf-8")
        if model not in modules:
            # Triton wants the folder, and neither git nor an object store keeps an empty one.
            (version / ".keep").touch()
        for name, module in modules.get(model, {}).items():
            shutil.copyfile(MODEL_REPO / module, version / name)


class Linker:
    """Hard-links files into folders named after their content, and copies where the file system cannot."""

    def __init__(self, parent: Path, on_link: Callable[[Path, str], object], progress: Progress) -> None:
        self.parent, self.on_link, self.progress = parent, on_link, progress
        self.noted = False

    def link_folder(self, kind: str, files: Mapping[str, Path]) -> Path:
        """files: by the name that they have in the folder, which may have one in it."""
        digests = {name: digest_file(file) for name, file in files.items()}
        content = digest_json(digests)
        folder = self.parent / f"{kind}-{content.partition(':')[2][:16]}"
        folder.mkdir(parents=True)
        for name, file in files.items():
            target = folder / name
            target.parent.mkdir(exist_ok=True)
            self._link(file, target)
            self.on_link(target, digests[name])
            self.progress.advance(target.stat().st_size)
        return folder

    def _link(self, source: Path, target: Path) -> None:
        try:
            os.link(source.resolve(), target)
        except OSError as error:
            if error.errno not in NOT_LINKABLE:
                raise
            if not self.noted:
                self.progress.note(f"files are copied, not linked: {error.strerror} (from {source.parent})")
                self.noted = True
            shutil.copyfile(source, target)


def open_with_tokenizer(checkpoint: Path) -> CheckpointFolder:
    """Raises PackageError where it has no tokenizer: what serves it takes and gives text."""
    from pipeline.checkpoint.folder import CheckpointFolder

    if not (checkpoint / "tokenizer_config.json").is_file():
        raise PackageError(
            f"{checkpoint} has no tokenizer, and the models take and give text",
            hint="copy tokenizer.json and tokenizer_config.json into the model's folder and convert it again",
        )
    return CheckpointFolder.open(checkpoint)


def by_name(files: Iterable[Path]) -> dict[str, Path]:
    return {file.name: file for file in files}
