"""The emitted models' own code, run as Triton's Python stub runs it, over a stand-in for its module."""

import importlib.util
import json
import sys
import types

import numpy as np
import pytest
from google.protobuf import json_format
from tokenizers import Tokenizer as BareTokenizer
from tritonclient.grpc.model_config_pb2 import DataType

from pipeline.triton.model_config import load_base, parse_config
from tests.triton.emission import emit


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class Response:
    def __init__(self, output_tensors=(), error=None):
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Sender:
    def __init__(self):
        self.sent = []

    def send(self, response, flags=0):
        self.sent.append((response, flags))


class Request:
    def __init__(self, *, said="", **arrays):
        self.parameters = lambda: said
        self._inputs = [Tensor(name, array) for name, array in arrays.items()]
        self.sender = Sender()

    def inputs(self):
        return self._inputs

    def get_response_sender(self):
        return self.sender


class ErrorText(str):
    UNAVAILABLE, INVALID_ARG, INTERNAL = "unavailable", "invalid", "internal"

    def __new__(cls, text, code=None):
        made = super().__new__(cls, text)
        made.code = code
        return made


class ModelError(Exception):
    pass


@pytest.fixture(scope="module")
def package(tmp_path_factory, llama_path):
    return emit(tmp_path_factory.mktemp("models"), llama_path)


@pytest.fixture
def load(package, monkeypatch):
    """Imports a model as the stub does, its version folder on the path, and initializes it."""
    backend = types.ModuleType("triton_python_backend_utils")
    backend.Tensor, backend.InferenceResponse, backend.TritonError = Tensor, Response, ErrorText
    backend.Logger = types.SimpleNamespace(log_info=print, log_error=print)
    backend.TritonModelException, backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL = ModelError, 1
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)

    def start(model, source=None, **parameters):
        folder = package.path / model
        monkeypatch.syspath_prepend(str(folder / "1"))
        for name in ("parameters", "text", "chat", "stream", "answer"):
            monkeypatch.delitem(sys.modules, f"trtseek_{name}", raising=False)
        spec = importlib.util.spec_from_file_location(f"{model}_model", source or folder / "1" / "model.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = parse_config((folder / "config.pbtxt").read_text(), model)
        for key, value in parameters.items():
            config.parameters[key].string_value = value
        instance = module.TritonPythonModel()
        instance.initialize(
            {
                "model_name": model,
                "model_version": "1",
                "model_repository": str(folder),
                "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
            }
        )
        return instance

    return start


@pytest.fixture(scope="module")
def bare(llama_path):
    return BareTokenizer.from_file(str(llama_path / "tokenizer.json"))


def strings(*rows):
    return np.array(rows, dtype=np.object_)


def declared(package, model, kind):
    config = parse_config((package.path / model / "config.pbtxt").read_text(), model)
    types_ = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64, "TYPE_STRING": np.object_}
    return {t.name: (types_.get(DataType.Name(t.data_type)), len(t.dims)) for t in getattr(config, kind)}


def test_prompts_are_encoded_and_padded(load, package, bare):
    model = load("preprocessing")
    request = Request(
        QUERY=strings([b"def f():"], ["naïve 你好".encode()]),
        REQUEST_OUTPUT_LEN=np.array([[5], [6]], np.int32),
        STOP_WORDS_DICT=strings([b"end", b"\n\n"], [b"", b"x"]),
    )
    (response,) = model.execute([request])
    assert response.error is None
    ids, lengths = response.outputs["INPUT_ID"], response.outputs["REQUEST_INPUT_LEN"]
    expected = [bare.encode(text).ids for text in ("def f():", "naïve 你好")]
    assert lengths.tolist() == [[len(row)] for row in expected]
    assert [row[:n].tolist() for row, (n,) in zip(ids, lengths, strict=True)] == expected
    assert (ids[0, lengths[0, 0] :] == model.tokenizer.pad_id).all()
    words = response.outputs["STOP_WORDS_IDS"]
    first = [bare.encode(word, add_special_tokens=False).ids for word in ("end", "\n\n")]
    assert words[0, 0].tolist() == [*first[0], *first[1]]
    assert words[0, 1].tolist() == [len(first[0]), len(first[0]) + len(first[1]), *[-1] * (words.shape[2] - 2)]
    assert words[1].tolist() == [
        [bare.encode("x", add_special_tokens=False).ids[0], *[0] * (words.shape[2] - 1)],
        [1, *[-1] * (words.shape[2] - 1)],
    ]
    assert response.outputs["BAD_WORDS_IDS"].shape == (2, 2, 0)
    assert response.outputs["REQUEST_OUTPUT_LEN"].tolist() == [[5], [6]]
    assert response.outputs["OUT_END_ID"].tolist() == [[1], [1]]
    outputs = declared(package, "preprocessing", "output")
    for name, array in response.outputs.items():
        dtype, rank = outputs[name]
        assert array.dtype == dtype, name
        assert array.ndim == rank + 1, name  # the batch


def test_every_tensor_that_an_ensemble_takes_is_given(load):
    step = next(s for s in load_base("ensemble").ensemble_scheduling.step if s.model_name == "preprocessing")
    (response,) = load("preprocessing").execute(
        [Request(QUERY=strings([b"a"]), REQUEST_OUTPUT_LEN=np.array([[5]], np.int32))]
    )
    assert set(step.output_map) <= response.outputs.keys()


def test_ids_of_the_request_win(load):
    request = Request(
        QUERY=strings([b"a"]),
        REQUEST_OUTPUT_LEN=np.array([[5]], np.int32),
        END_ID=np.array([[9]], np.int32),
        PAD_ID=np.array([[8]], np.int32),
    )
    (response,) = load("preprocessing").execute([request])
    assert (response.outputs["OUT_END_ID"].item(), response.outputs["OUT_PAD_ID"].item()) == (9, 8)


def test_the_bias_counts_for_every_token_of_its_word(load, bare):
    request = Request(
        QUERY=strings([b"a"]),
        REQUEST_OUTPUT_LEN=np.array([[5]], np.int32),
        EMBEDDING_BIAS_WORDS=strings([b"ab", b"b"]),
        EMBEDDING_BIAS_WEIGHTS=np.array([[1.5, -0.5]], np.float32),
    )
    model = load("preprocessing")
    (response,) = model.execute([request])
    bias = response.outputs["EMBEDDING_BIAS"]
    a, b = (bare.encode(letter, add_special_tokens=False).ids[0] for letter in "ab")
    assert bias.shape == (1, model.tokenizer.vocab_size)
    assert {i: v for i, v in enumerate(bias[0].tolist()) if v} == {a: 1.5, b: 1.0}


LIMITED = ("QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"QUERY": strings([b"\xff"])}, "text is not UTF-8"),
        ({"IMAGE_URL": strings([b"http://x"])}, "IMAGE_URL: this model takes text only"),
        ({"EMBEDDING_BIAS_WORDS": strings([b"a"])}, "must come together"),
        *(({name: strings([b"a" * 101])}, f"{name}: holds 101 bytes, and at most 100 are served") for name in LIMITED),
    ],
)
def test_a_bad_request_is_answered_alone(load, arrays, message):
    length = np.array([[5]], np.int32)
    good = Request(QUERY=strings([b"a"]), REQUEST_OUTPUT_LEN=length)
    bad = Request(**{"QUERY": strings([b"a"]), "REQUEST_OUTPUT_LEN": length, **arrays})
    first, second, third = load("preprocessing", max_prompt_bytes="100").execute([good, bad, good])
    assert message in second.error
    assert second.error.code == "invalid"
    assert first.error is None
    assert third.error is None


@pytest.mark.parametrize(
    ("model", "arrays"),
    [
        ("preprocessing", {"QUERY": strings([b"a"]), "REQUEST_OUTPUT_LEN": np.array([[5]], np.int32)}),
        ("postprocessing", {"TOKENS_BATCH": np.array([[[5]]], np.int32), "SEQUENCE_LENGTH": np.array([[1]], np.int32)}),
    ],
)
def test_parameters_that_nobody_knows_are_refused(load, model, arrays):
    """Of an ensemble's request each model sees them."""
    good, bad = load(model).execute([Request(said='{"min_p": 0.5}', **arrays), Request(said='{"minp": 1}', **arrays)])
    assert good.error is None
    assert bad.error.startswith("minp: is neither a parameter nor an input of the model that was asked")
    assert bad.error.code == "invalid"


def test_no_text_begins_while_the_server_drains(load, monkeypatch, tmp_path):
    model = load("preprocessing")
    request = Request(QUERY=strings([b"a"]), REQUEST_OUTPUT_LEN=np.array([[5]], np.int32))
    monkeypatch.setenv("TRTSEEK_DRAIN_MARK", str(tmp_path / "draining"))
    assert model.execute([request])[0].error is None
    (tmp_path / "draining").touch()
    (response,) = model.execute([request])
    assert (response.error, response.error.code) == ("the server is shutting down", "unavailable")


def test_an_empty_prompt_is_refused_where_no_token_is_added(load):
    model = load("preprocessing", add_special_tokens="false")
    (response,) = model.execute([Request(QUERY=strings([b""]), REQUEST_OUTPUT_LEN=np.array([[5]], np.int32))])
    assert response.error == "the prompt is empty"


def test_a_parameter_that_is_no_flag_is_refused(load):
    with pytest.raises(ValueError, match="add_special_tokens must be true or false, not 'maybe'"):
        load("preprocessing", add_special_tokens="maybe")


def test_tokens_are_decoded(load, bare):
    texts = ["hello world", "naïve 你好", ""]
    rows = [bare.encode(text, add_special_tokens=False).ids for text in texts]
    tokens = np.zeros((3, 1, max(map(len, rows))), np.int32)
    for target, row in zip(tokens, rows, strict=True):
        target[0, : len(row)] = row
    lengths = np.array([[len(row)] for row in rows], np.int32)
    (response,) = load("postprocessing").execute([Request(TOKENS_BATCH=tokens, SEQUENCE_LENGTH=lengths)])
    assert [text.decode() for text in response.outputs["OUTPUT"]] == texts


@pytest.mark.parametrize(("flag", "text"), [("true", b"ab"), ("false", b"<eos>ab")])
def test_special_tokens_are_dropped_if_asked(load, bare, flag, text):
    eos = bare.id_to_token(1)
    ids = [1, *bare.encode("ab", add_special_tokens=False).ids]
    request = Request(TOKENS_BATCH=np.array([[ids]], np.int32), SEQUENCE_LENGTH=np.array([[3]], np.int32))
    (response,) = load("postprocessing", skip_special_tokens=flag).execute([request])
    assert response.outputs["OUTPUT"].tolist() == [text.replace(b"<eos>", eos.encode())]


def test_lengths_that_do_not_fit_are_refused(load):
    request = Request(TOKENS_BATCH=np.zeros((1, 1, 2), np.int32), SEQUENCE_LENGTH=np.array([[3]], np.int32))
    (response,) = load("postprocessing").execute([request])
    assert "do not fit" in response.error


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"network_digest": "blake3:other"}, "engine.json is of network blake3:abab.*the repository of blake3:other"),
        ({"engine_digest": "blake3:other"}, "not blake3:other"),
        ({"package_format": "1"}, "tensorrt_llm was emitted by another version of trtseek: it is of format 1, and"),
        ({"gpt_model_path": "../../nowhere"}, "engine.json: .*No such file"),
        ({"checkpoint_path": "../../nowhere"}, "model-00001-of-000003.safetensors is missing"),
        ({"network_path": "config.pbtxt"}, "config.pbtxt: "),
    ],
)
def test_the_backend_refuses_what_does_not_belong_together(load, package, parameters, problem):
    with pytest.raises(ModelError, match=problem):
        load("tensorrt_llm", package.backends / "trtseek" / "model.py", **parameters)


def test_the_backend_refuses_a_truncated_engine(load, package, tmp_path, llama_path):
    other = emit(tmp_path, llama_path)
    engine = other.artifacts["engine"] / "model.engine"
    engine.unlink()
    engine.write_bytes(b"eng")
    with pytest.raises(ModelError, match=r"model\.engine has 3 bytes, engine\.json says 6"):
        load("tensorrt_llm", package.backends / "trtseek" / "model.py", gpt_model_path=str(engine.parent))
