import shutil

import pytest

from pipeline.errors import PackageError
from pipeline.triton.lint import check_repository, lint_repository
from tests.triton.emission import emit
from tests.triton.tensorrtllm import packages


@pytest.fixture
def package(tmp_path, llama_path):
    return emit(tmp_path, llama_path)


@pytest.fixture
def foreign(tmp_path, converted_llama):
    """Of flavour tensorrtllm, whose `ensemble` is one of Triton's."""
    return packages.emit(tmp_path / "foreign", converted_llama) / "model_repository"


def edit(repository, model, old, new):
    file = repository / model / "config.pbtxt"
    text = file.read_text()
    assert old in text, f"{old!r} is not in {file}"
    file.write_text(text.replace(old, new, 1))


def lint(package):
    return list(lint_repository(package.path, backends=package.backends))


def test_what_is_emitted_is_clean(package, foreign):
    assert lint(package) == []
    assert list(lint_repository(foreign, backends=None)) == []


@pytest.mark.parametrize(
    ("model", "old", "new", "problem"),
    [
        ("tensorrt_llm", 'name: "tensorrt_llm"', 'name: "other"', "name 'other' is not the folder's, 'tensorrt_llm'"),
        ("tensorrt_llm", 'name: "end_id"', 'name: "pad_id"', "input pad_id is declared 2 times"),
        ("ensemble", 'name: "seed"', 'name: "top_k"', "input top_k is declared 2 times"),
        ("ensemble", 'name: "batch_index"', 'name: "sequence_index"', "output sequence_index is declared 2 times"),
        ("preprocessing", 'value: "../../artifacts', 'value: "${tokenizer_dir}', "a placeholder ${…} was never filled"),
        ("preprocessing", 'string_value: "../../artifacts', 'string_value: "../../artefacts', "does not exist"),
        ("preprocessing", "max_batch_size: 8", "max_batch_size: 4", "preferred_batch_size 8 exceeds max_batch_size 4"),
        ("tensorrt_llm", "max_batch_size: 8", "max_batch_size: 0", "max_batch_size is 0"),
        ("tensorrt_llm", 'backend: "trtseek"', 'backend: "absent"', "absent/model.py is missing"),
        ("tensorrt_llm", 'backend: "trtseek"', "", "there is neither a backend nor a platform"),
        ("tensorrt_llm", "dims: -1", "dims: 0", "input input_ids has dims [0]"),
        ("postprocessing", "data_type: TYPE_STRING", "", "output OUTPUT has no data_type"),
        ("postprocessing", "max_batch_size: 8", "max_batch_size: x", "postprocessing/config.pbtxt: "),
    ],
)
def test_problems(package, model, old, new, problem):
    edit(package.path, model, old, new)
    found = lint(package)
    assert any(problem in text for text in found), found
    with pytest.raises(PackageError) as caught:
        check_repository(package.path, backends=package.backends)
    assert caught.value.message == "\n".join(found)


@pytest.mark.parametrize(
    ("model", "old", "new", "problem"),
    [
        ("preprocessing", "max_batch_size: 4", "max_batch_size: 2", "has max_batch_size 2, the ensemble 4"),
        ("postprocessing", "data_type: TYPE_INT32", "data_type: TYPE_INT64", "TOKENS_BATCH is TYPE_INT64[-1, -1], and"),
        ("postprocessing", "dims: -1", "", "TOKENS_BATCH is TYPE_INT32[-1], and _TOKENS_BATCH is TYPE_INT32[-1, -1]"),
        ("ensemble", 'value: "_TOKENS_BATCH"', 'value: "_TOKEN_BATCH"', "_TOKENS_BATCH, which nothing produces"),
        ("ensemble", 'key: "output_ids"', 'key: "output_id"', "the model has no output output_id"),
        ("ensemble", 'key: "runtime_top_k"', 'key: "top_k"', "the model has no input top_k"),
        ("ensemble", 'value: "top_k"', 'value: "top_p"', "runtime_top_k is TYPE_INT32[1], and top_p is TYPE_FP32[1]"),
        ("ensemble", 'value: "top_k"', 'value: "num_return_sequences"', "input top_k is used by no step"),
        ("ensemble", 'value: "_INPUT_ID"', 'value: "max_tokens"', "max_tokens is already produced elsewhere"),
        ("ensemble", 'model_name: "postprocessing"', 'model_name: "absent"', "step absent: there is no such model"),
        ("ensemble", 'value: "text_output"', 'value: "text"', "output text_output is produced by no step"),
        ("ensemble", 'key: "input_lengths"', 'key: "beam_width"', "required input input_lengths is not mapped"),
    ],
)
def test_problems_of_an_ensembles_wiring(foreign, model, old, new, problem):
    edit(foreign, model, old, new)
    found = list(lint_repository(foreign, backends=None))
    assert any(problem in text for text in found), found


def test_an_optional_tensor_must_not_feed_a_required_input(foreign):
    edit(foreign, "preprocessing", 'name: "DECODER_QUERY"\n  data_type: TYPE_STRING\n  dims: 1\n  optional: true', "")
    edit(
        foreign,
        "preprocessing",
        "input {\n  \n}",
        'input {\n  name: "DECODER_QUERY"\n  data_type: TYPE_STRING\n  dims: 1\n}',
    )
    assert any(
        "DECODER_QUERY is required, and decoder_text_input is optional" in text
        for text in lint_repository(foreign, backends=None)
    )


def test_a_step_must_not_wait_for_itself(foreign):
    edit(foreign, "ensemble", 'value: "max_tokens"', 'value: "_SEQUENCE_LENGTH"')
    assert any("waits for its own output" in text for text in lint_repository(foreign, backends=None))


def test_missing_files(package):
    (package.path / "stray").mkdir()
    (package.path / "preprocessing" / "1" / "model.py").unlink()
    (package.backends / "trtseek" / "model.py").write_text("def broken(:\n")
    shutil.rmtree(package.path / "ensemble" / "1")
    found = "\n".join(lint(package))
    assert "stray/config.pbtxt is missing" in found
    assert "preprocessing/1/model.py is missing" in found
    assert "trtseek/model.py:1: invalid syntax" in found
    assert "ensemble/config.pbtxt: there is no version folder" in found


def test_an_empty_repository(tmp_path):
    assert "holds no model" in next(lint_repository(tmp_path, backends=tmp_path))
