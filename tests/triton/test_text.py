"""The text models' shared modules by themselves: streaming, stop strings, chats, requests for `tensorrt_llm`."""

import importlib
import json
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BareTokenizer
from transformers import AutoTokenizer

from pipeline.triton import MODEL_REPO
from pipeline.triton.backend.request_tensors import SERVED
from pipeline.triton.model_config import parse_config

TEXTS = st.text(st.sampled_from("ab  é你😀\n.") | st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module", autouse=True)
def modules():
    """As the stub finds them: beside the model's code."""
    sys.path.insert(0, str(MODEL_REPO))
    names = [f"trtseek_{name}" for name in ("parameters", "text", "chat", "stream", "answer")]
    yield {name.removeprefix("trtseek_"): importlib.import_module(name) for name in names}
    sys.path.remove(str(MODEL_REPO))
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer(modules, llama_path):
    return modules["text"].Tokenizer(llama_path)


@pytest.fixture(scope="module")
def reference(llama_path):
    return AutoTokenizer.from_pretrained(llama_path)


def byte_level():
    """Merges across characters and spaces, so that a token may begin and end anywhere."""
    from tokenizers.trainers import BpeTrainer

    bare = BareTokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    bare.train_from_iterator(["a 你 b 😀 éé ab ab  你好 .\n", "😀😀 a b é"] * 4, trainer)
    bare.add_special_tokens([AddedToken("<eos>", special=True)])
    return bare


def metaspace():
    """SentencePiece's manner: a leading space belongs to the token, and the first one's is dropped in decoding."""
    pieces = ["▁", "▁a", "▁b", "a", "b", "ab", ".", "▁ab", "你", "<unk>"]
    bare = BareTokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    bare.decoder = decoders.Metaspace()
    return bare


class Bare:
    def __init__(self, bare):
        self.bare = bare

    def decode(self, ids):
        return self.bare.decode(list(ids), skip_special_tokens=True)


BYTE_LEVEL, METASPACE = Bare(byte_level()), Bare(metaspace())


def stream(modules, decoder, prompt, pieces):
    detokenizer = modules["stream"].Detokenizer(decoder, prompt)
    said = [detokenizer.add(piece) for piece in pieces]
    return said, detokenizer.finish()


def split(data, ids):
    pieces = []
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        pieces.append(ids[:count])
        ids = ids[count:]
    return pieces


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(), ids=st.lists(st.integers(0, 400), max_size=90), prompt=st.lists(st.integers(0, 400), max_size=30)
)
def test_what_is_streamed_is_what_decoding_the_whole_gives(modules, data, ids, prompt):
    """Any tokens at all: bytes that are no characters, special ones, characters that the prompt ends within."""
    said, rest = stream(modules, BYTE_LEVEL, prompt, split(data, ids))
    before = BYTE_LEVEL.decode(prompt).removesuffix("\ufffd")
    assert before + "".join(said) + rest == BYTE_LEVEL.decode(prompt + ids)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    ids=st.lists(st.integers(0, 8), max_size=60),
    prompt=st.lists(st.integers(0, 8), min_size=1, max_size=12),
)
def test_leading_spaces_are_kept(modules, data, ids, prompt):
    said, rest = stream(modules, METASPACE, prompt, split(data, ids))
    assert METASPACE.decode(prompt) + "".join(said) + rest == METASPACE.decode(prompt + ids)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_only_whole_characters_are_said(modules, text):
    """A text that is all characters is said one character at a time at the latest, and never as U+FFFD."""
    if "\ufffd" in text:
        return
    ids = BYTE_LEVEL.bare.encode(text).ids
    said, rest = stream(modules, BYTE_LEVEL, [], [[token] for token in ids])
    assert rest == ""
    for place in range(len(ids) + 1):
        whole = BYTE_LEVEL.decode(ids[:place])
        assert "".join(said[:place]) == whole.rstrip("\ufffd")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_are_found_across_borders(modules, pieces, stops):
    finder = modules["stream"].StopFinder(stops)
    said = [finder.add(piece) for piece in pieces]
    rest = finder.finish()
    # The one that is complete first, and of these the one that began first.
    text = "".join(pieces)
    for end in range(len(text) + 1):
        begun = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begun:
            break
    else:
        assert "".join(said) + rest == text
        assert not finder.found
        return
    assert finder.found
    assert rest == ""
    assert text.startswith("".join(said))
    assert not any(stop in "".join(said) for stop in stops)
    # A piece may hold more than one: then the one that begins first counts.
    assert len("".join(said)) <= begun[0] or len(pieces) > 1


def test_what_cannot_begin_a_stop_string_is_said_at_once(modules):
    finder = modules["stream"].StopFinder(["\n\nclass", "###"])
    assert finder.add("x = 1\n") == "x = 1"
    assert finder.add("y") == "\ny"
    assert finder.add("#") == ""
    assert finder.add("# a") == "## a"
    assert finder.add("\n\ncl") == ""
    assert finder.finish() == "\n\ncl"


def test_a_chat_is_rendered_by_the_checkpoints_template(tokenizer, reference):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "naïve 你好"}]
    text = tokenizer.render_chat(json.dumps(messages).encode())
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.encode_word(text.encode()) == expected
    assert expected.count(reference.bos_token_id) <= 1


def test_a_prompt_that_begins_with_bos_gets_no_second_one(tokenizer, reference):
    bos = reference.bos_token
    plain = tokenizer.encode_prompt(b"ab")
    assert tokenizer.encode_prompt((bos + "ab").encode()) in (plain, [reference.bos_token_id, *plain])
    assert tokenizer.encode_prompt((bos + "ab").encode()).count(reference.bos_token_id) == 1


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a list"),
        ('{"role": "user"}', "must be a list"),
        ('["hi"]', "must be a list"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_chat_that_is_none_is_refused(modules, tokenizer, messages, problem):
    with pytest.raises(modules["text"].RequestError, match=f"messages: {problem}"):
        tokenizer.render_chat(messages.encode())


def arrays(**values):
    return {
        name: np.array(value, np.object_ if isinstance(value[0][0], bytes) else None) for name, value in values.items()
    }


def test_a_text_request_becomes_a_token_request(modules, tokenizer):
    chat = modules["chat"]
    inputs = arrays(
        text_input=[[b"ab"]],
        max_tokens=[[5]],
        top_k=[[3]],
        temperature=[[0.5]],
        stop_words=[[b"x y", b"<eos>"]],
        bad_words=[[b"no"]],
        seed=[[7]],
        return_log_probs=[[True]],
    )
    (prompt,) = chat.read_prompts(tokenizer, inputs, max_bytes=100, parameters={})
    assert (prompt.text, prompt.ids, prompt.stops) == ("ab", tokenizer.encode_prompt(b"ab"), ("x y", "<eos>"))
    assert (prompt.streams, prompt.repeats, prompt.wanted) == (False, True, ("cum_log_probs", "output_log_probs"))
    built = chat.build_inputs(tokenizer, inputs, prompt, row=0, rows=1)
    assert built["input_ids"].tolist() == [prompt.ids]
    assert built["streaming"].tolist() == [[True]]  # somebody looks for "x y" in the text
    assert built["request_output_len"].tolist() == [[5]]
    assert built["runtime_top_k"].tolist() == [[3]]
    assert built["end_id"].tolist() == [[tokenizer.end_id]]
    assert built["seed"].tolist() == [[7]]
    assert built["bad_words_list"][0, 0].tolist() == tokenizer.encode_word(b"no")
    special = built.get("stop_words_list")
    assert (special is None) == (not tokenizer.is_special("<eos>"))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"max_tokens": [[5]]}, "give either text_input or messages"),
        ({"max_tokens": [[5]], "text_input": [[b"a"]], "messages": [[b"[]"]]}, "give either"),
        ({"text_input": [[b"a"]]}, "max_tokens: is missing"),
        ({"text_input": [[b"a" * 101]], "max_tokens": [[5]]}, "text_input: holds 101 bytes, and at most 100"),
        *(
            ({"text_input": [[b"a"]], "max_tokens": [[5]], name: [[b"a" * 60, b"b" * 41]]}, f"{name}: holds 101 bytes")
            for name in ("stop_words", "bad_words", "embedding_bias_words")
        ),
        ({"text_input": [[b"\xff"]], "max_tokens": [[5]]}, "not UTF-8"),
        ({"text_input": [[b"a"]], "max_tokens": [[5]], "stop_words": [[b"\xff"]]}, "stop_words: is not UTF-8"),
        ({"text_input": [[b"a"]], "max_tokens": [[5]], "image_url_input": [[b"x"]]}, "image_url_input: not served"),
        ({"text_input": [[b"a"], [b"b"]], "max_tokens": [[5]], "stop_words": [[b"x"]]}, "1 rows, and the request 2"),
    ],
)
def test_bad_text_requests(modules, tokenizer, values, problem):
    with pytest.raises(modules["text"].RequestError, match=problem):
        modules["chat"].read_prompts(tokenizer, arrays(**values), max_bytes=100, parameters={})


def test_ids_are_told_where_they_are_asked_for(modules, tokenizer):
    inputs = arrays(text_input=[[b"ab"], [b"c"]], max_tokens=[[5], [5]])
    for choice, wanted in ((True, ("output_ids",)), ("true", ("output_ids",)), (False, ()), ("false", ())):
        read = modules["chat"].read_prompts(tokenizer, inputs, max_bytes=100, parameters={"return_output_ids": choice})
        assert [prompt.wanted for prompt in read] == [wanted, wanted]
    with pytest.raises(modules["parameters"].ParameterError, match=r"return_output_ids: is 1 \(true or false\)"):
        modules["chat"].read_prompts(tokenizer, inputs, max_bytes=100, parameters={"return_output_ids": 1})


def test_a_parameter_that_nobody_knows_is_refused(modules):
    """As an input whose name is wrong comes from `generate`."""
    check, served = modules["parameters"].check_parameters, modules["chat"].SERVED
    check({"min_p": 0.1, "priority": 1, "sequence_id": 3, "triton_final_response": True}, "m", served)
    for name, message in (
        (
            "temprature",
            r"temprature: is neither a parameter nor an input of m \(did you mean temperature\? parameters: ",
        ),
        ("timout_ms", r"timout_ms: .*did you mean timeout_ms\?"),
        ("zzz", r"zzz: .* \(parameters: cache_salt, .*; inputs: bad_words, .*text_input, top_k, top_p\)"),
        ("max_tokens", r"max_tokens: is an input of m, and came as a parameter"),
        ("input_ids", r"input_ids: is no input of m, but of tensorrt_llm \(parameters: .*; inputs: "),
        ("stop", r"stop: .*did you mean stop_words\?"),
        ("stop_words_list", r"stop_words_list: .*did you mean stop_words\?"),
        ("max_new_tokens", r"max_new_tokens: .*did you mean max_tokens\?"),
        ("n", r"n: .*did you mean num_return_sequences\?"),
    ):
        with pytest.raises(modules["parameters"].ParameterError, match=message):
            check({"min_p": 0.1, name: 1}, "m", served)
    with pytest.raises(modules["parameters"].ParameterError, match="nor an input of the model that was asked"):
        check({"temprature": 1}, "preprocessing", ())


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
def test_what_is_said_of_inputs_is_true_of_the_model(modules, model):
    config = parse_config((MODEL_REPO / model / "config.pbtxt").read_text(), model)
    declared = {tensor.name for tensor in config.input}
    args = {"model_config": json.dumps({"input": [{"name": name} for name in declared]})}
    served = SERVED if model == "tensorrt_llm" else modules["text"].list_inputs(args, modules["chat"].SERVED)
    assert set(served) <= declared
    assert set(modules["chat"].SERVED) - set(served) == {"messages"} or model != "ensemble"
    parameters = modules["parameters"]
    for name, takers in parameters.TAKERS.items():
        assert (name in declared) == (model in takers.split(" and "))
        problem = f"is an input of {model}, and" if name in declared else f"is no input of {model}, but of {takers} "
        with pytest.raises(parameters.ParameterError, match=problem):
            parameters.check_parameters({name: "[]"}, model, served)
    for name, meant in parameters.ALIASES.items():
        if name not in served and (there := [alias for alias in meant if alias in served]):
            with pytest.raises(parameters.ParameterError, match=rf"did you mean {there[0]}\?"):
                parameters.check_parameters({name: "x"}, model, served)


def test_errors_name_the_text_requests_tensors(modules):
    assert modules["chat"].rename_fields("runtime_top_k is -1") == "top_k is -1"
    assert modules["chat"].rename_fields("request_output_len is 0") == "max_tokens is 0"


def child(ids, sequence=0, **others):
    values = {name: np.array(value, np.float32) for name, value in others.items()}
    return {
        "output_ids": np.array([[ids]], np.int32).reshape(1, 1, len(ids)),
        "sequence_length": np.array([[len(ids)]], np.int32),
        "sequence_index": np.array([[sequence]], np.int32),
        **values,
    }


def make_prompt(modules, tokenizer, **changes):
    values = {"text": "ab", "ids": tokenizer.encode_prompt(b"ab"), "stops": (), "streams": True, "repeats": False}
    return modules["chat"].Prompt(**{**values, "wanted": ("output_log_probs",), **changes})


def texts(responses):
    return [response["text_output"][0].decode() for response in responses]


def test_a_streamed_answer(modules, tokenizer):
    ids = tokenizer.encode_word("é!".encode())
    answer = modules["answer"].Answer(tokenizer, make_prompt(modules, tokenizer), row=2, accumulates=False)
    assert answer.add(child(ids[:1], output_log_probs=[[[-1]]])) == []  # half a character
    (response,) = answer.add(child(ids[1:2], output_log_probs=[[[-2]]]))
    assert response["text_output"][0].decode() == "é"
    assert response["output_log_probs"].tolist() == [[[-1, -2]]]  # none is lost while text is held back
    assert response["batch_index"].tolist() == [[2]]
    assert texts(answer.add(child(ids[2:]))) == ["!"]
    assert answer.finish() == []


@pytest.mark.parametrize("streams", [True, False])
def test_the_ids_of_an_answer_are_those_of_its_tokens(modules, tokenizer, streams):
    """Whatever text is held back, and not what an engine pads its answers with."""
    ids = tokenizer.encode_word("é! end".encode())
    prompt = make_prompt(modules, tokenizer, wanted=("output_ids",), streams=streams, stops=("end",))
    answer = modules["answer"].Answer(tokenizer, prompt, row=0, accumulates=False)
    assert answer.outputs == ["output_ids", "sequence_length", "sequence_index"]
    responses = []
    for token in [*ids, 7]:
        padded = child([token, 0])
        responses += answer.add({**padded, "sequence_length": np.array([[1]], np.int32)})
    responses += answer.finish()
    assert "".join(texts(responses)) == "é! "
    said = np.concatenate([response["output_ids"] for response in responses], 2)
    assert said.dtype == np.int32 and said.tolist() == [[ids]]  # after the stop string, none


@pytest.mark.parametrize("together", [1, 3, 99])
@pytest.mark.parametrize("streams", [True, False])
def test_what_is_counted_of_an_answer_is_what_is_returned(modules, tokenizer, streams, together):
    """Not what tensorrt_llm made until it heard of the stop string, in the same response or in one after it."""
    ids = tokenizer.encode_word(b"an end")
    made = [*ids, 5, 6, 7]
    wanted = ("output_ids", "output_log_probs", "cum_log_probs", "num_output_tokens")
    prompt = make_prompt(modules, tokenizer, wanted=wanted, streams=streams, stops=("end",))
    answer = modules["answer"].Answer(tokenizer, prompt, row=0, accumulates=False)
    responses = []
    for start in range(0, len(made), together):
        piece = made[start : start + together]
        others = {"output_log_probs": [[[-1] * len(piece)]], "cum_log_probs": [[-(start + len(piece))]]}
        responses += answer.add(child(piece, **others))
    responses += answer.add({**child([]), "num_output_tokens": np.array([[len(made)]], np.int32)})
    responses += answer.finish()
    assert "".join(texts(responses)) == "an "
    for name in ("output_ids", "output_log_probs"):
        said = [response[name] for response in responses if name in response]
        assert np.concatenate(said, 2).shape == (1, 1, len(ids)), name
    assert [response["cum_log_probs"] for response in responses if "cum_log_probs" in response][-1] == -len(ids)
    (count,) = [response["num_output_tokens"] for response in responses if "num_output_tokens" in response]
    assert (count.tolist(), count.dtype) == ([[len(ids)]], np.int32)


def test_an_accumulating_answer(modules, tokenizer):
    answer = modules["answer"].Answer(tokenizer, make_prompt(modules, tokenizer), row=0, accumulates=True)
    assert texts(answer.add(child(tokenizer.encode_word(b"x")))) == ["x"]
    assert texts(answer.add(child(tokenizer.encode_word(b"y")))) == ["xy"]


def test_a_whole_answer_repeats_the_prompt_unless_told(modules, tokenizer):
    for repeats, expected in ((True, "abxy"), (False, "xy")):
        prompt = make_prompt(modules, tokenizer, streams=False, repeats=repeats)
        answer = modules["answer"].Answer(tokenizer, prompt, row=0, accumulates=False)
        assert answer.add(child(tokenizer.encode_word(b"xy"))) == []
        assert texts(answer.finish()) == [expected]


def test_a_stop_string_ends_an_answer_before_it(modules, tokenizer):
    prompt = make_prompt(modules, tokenizer, stops=("end",))
    answer = modules["answer"].Answer(tokenizer, prompt, row=0, accumulates=False)
    said = []
    for token in tokenizer.encode_word(b"an end"):
        assert not answer.stopped
        said += texts(answer.add(child([token])))
    assert answer.stopped
    said += texts(answer.add(child(tokenizer.encode_word(b"more"))))
    said += texts(answer.finish())
    assert "".join(said) == "an "


def test_sequences_are_kept_apart(modules, tokenizer):
    prompt = make_prompt(modules, tokenizer, streams=False, stops=("x",), sequences=2)
    answer = modules["answer"].Answer(tokenizer, prompt, row=0, accumulates=False)
    answer.add(child(tokenizer.encode_word(b"ax"), sequence=1))
    assert not answer.stopped  # the other has not said anything
    answer.add(child(tokenizer.encode_word(b"b"), sequence=0))
    assert not answer.stopped
    responses = answer.finish()
    assert texts(responses) == ["b", "a"]
    assert [response["sequence_index"].item() for response in responses] == [0, 1]


def test_an_answer_without_text_is_answered(modules, tokenizer):
    answer = modules["answer"].Answer(tokenizer, make_prompt(modules, tokenizer), row=0, accumulates=False)
    assert answer.add(child([])) == []
    assert texts(answer.finish()) == [""]


def test_a_path_leads_to_what_is_behind_a_link_and_is_not_named_after_it(modules, tmp_path):
    (tmp_path / "ünï/tokenizer").mkdir(parents=True)
    (tmp_path / "artifacts").symlink_to(tmp_path / "ünï")
    model = tmp_path / "models/preprocessing"
    model.mkdir(parents=True)
    for folder in (model, model.parent):
        args = {"model_repository": str(folder), "model_name": "preprocessing"}
        path = modules["text"].resolve_path(args, "../../artifacts/tokenizer")
        assert path.is_dir() and str(path.relative_to(tmp_path)).isascii()
