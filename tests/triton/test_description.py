import pytest

from pipeline.errors import PackageError
from pipeline.triton.description import describe_repository, is_repository
from tests.triton.emission import NETWORK_DIGEST, emit


def test_what_was_emitted_is_read_back(tmp_path, llama_path):
    package = emit(tmp_path, llama_path)
    assert is_repository(tmp_path / "package")
    description = describe_repository(tmp_path / "package")
    assert description == describe_repository(package.path)
    models = {model.name: model for model in description.models}
    assert (models["tensorrt_llm"].backend, models["tensorrt_llm"].max_batch_size) == ("trtseek", 8)
    assert (models["ensemble"].backend, models["ensemble"].inputs) == ("ensemble", 36)
    assert description.network_digest == NETWORK_DIGEST
    weights = sum(file.stat().st_size for file in llama_path.glob("*.safetensors"))
    assert weights < description.artifacts["checkpoint"] < weights + 300_000
    assert description.problems == ()


def test_damage_is_told(tmp_path, llama_path):
    package = emit(tmp_path, llama_path)
    (package.path / "postprocessing" / "1" / "model.py").unlink()
    (problem,) = describe_repository(package.path).problems
    assert "postprocessing/1/model.py is missing" in problem


def test_another_folder_is_none(tmp_path):
    assert not is_repository(tmp_path)
    with pytest.raises(PackageError, match="holds no model repository"):
        describe_repository(tmp_path)
