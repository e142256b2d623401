"""What the text models share: strings to token ids and back, in the tensors of TensorRT-LLM's inflight_batcher_llm.

Copied into each of those models' version folders. Needs numpy below 2 (Triton's Python stub returns empty tensors
otherwise) and transformers; knows nothing of Triton, so it is tested without it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

# The environment variable that names a file. While it is there, no new request is taken; those at hand are answered.
DRAIN_MARK = "TRTSEEK_DRAIN_MARK"
DRAINING = "the server is shutting down"


class RequestError(ValueError):
    """A request that cannot be served as asked; the message is the client's."""


class Tokenizer:
    """A packaged Hugging Face tokenizer. `end_id` and `pad_id` are what requests get that give none."""

    def __init__(self, folder: Path, *, add_special_tokens: bool = True, skip_special_tokens: bool = True) -> None:
        # transformers, not the bare tokenizers library: whether BOS is added is decided by tokenizer_config.json in
        # many models (DeepSeek's among them), which only transformers reads.
        from transformers import AutoTokenizer

        if not (folder / "tokenizer_config.json").is_file():
            raise FileNotFoundError(f"no tokenizer in {folder}")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._add_special_tokens = add_special_tokens
        self._skip_special_tokens = skip_special_tokens
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer in {folder} has no eos_token")
        self.end_id = int(self._tokenizer.eos_token_id)
        pad_id = self._tokenizer.pad_token_id
        self.pad_id = self.end_id if pad_id is None else int(pad_id)
        self.vocab_size = len(self._tokenizer)

    def encode_prompt(self, text: bytes) -> list[int]:
        """Ids of a prompt. RequestError for bytes that are not UTF-8 and for a prompt without a token.

        A prompt that begins with the BOS token's own text has been through a chat template: it gets no second one.
        """
        bos = self._tokenizer.bos_token
        is_rendered = bool(bos) and text.startswith(bos.encode())
        ids = self._encode(text, add_special_tokens=self._add_special_tokens and not is_rendered)
        if not ids:
            raise RequestError("the prompt is empty")
        return ids

    def render_chat(self, messages: bytes) -> str:
        """The prompt that the checkpoint's own template makes of `messages`, a JSON list of roles and contents, up to
        where the assistant is to answer. The template writes the special tokens: encode it with `encode_word`."""
        if not self._tokenizer.chat_template:
            raise RequestError("messages: this model has no chat template; send text_input")
        try:
            listed = json.loads(messages)
        except ValueError as error:
            raise RequestError(f"messages: is not JSON: {error}") from error
        except RecursionError:
            raise RequestError("messages: is nested too deeply") from None
        if not (isinstance(listed, list) and listed and all(isinstance(message, dict) for message in listed)):
            raise RequestError('messages: must be a list like [{"role": "user", "content": "…"}]')
        try:
            return str(self._tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a program of the checkpoint's, over what a client says: it may raise anything
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token, which is never seen in decoded text."""
        return text in self._tokenizer.all_special_tokens or text in self._tokenizer.get_added_vocab()

    def encode_word(self, text: bytes) -> list[int]:
        """Ids of a word by itself, which may differ from its ids inside a text."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        # Cleaning up spaces looks at what follows, so that text could not be given out as it comes.
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def _encode(self, text: bytes, *, add_special_tokens: bool) -> list[int]:
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"text is not UTF-8: {error}") from error
        return list(self._tokenizer.encode(decoded, add_special_tokens=add_special_tokens))


def check_sizes(inputs: Mapping[str, npt.NDArray[Any]], names: Sequence[str], max_bytes: int) -> None:
    """RequestError, which names the tensor, for texts of more bytes than that in a row: tokenizing takes long."""
    for name in names:
        for row in inputs.get(name, ()):
            size = sum(map(len, row.reshape(-1)))
            if size > max_bytes:
                raise RequestError(f"{name}: holds {size} bytes, and at most {max_bytes} are served")


def encode_prompts(tokenizer: Tokenizer, queries: npt.NDArray[np.object_]) -> tuple[Int32Array, Int32Array]:
    """`queries` [B, 1] of bytes to ids [B, longest], padded on the right, and lengths [B, 1]."""
    rows = [tokenizer.encode_prompt(query) for query in queries.reshape(-1)]
    lengths = np.array([[len(row)] for row in rows], np.int32)
    ids = np.full((len(rows), int(lengths.max())), tokenizer.pad_id, np.int32)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row)] = row
    return ids, lengths


def encode_words(tokenizer: Tokenizer, words: npt.NDArray[np.object_] | None, batch: int) -> Int32Array:
    """Stop or bad words [B, words] to TensorRT-LLM's word list [B, 2, L].

    Row 0 is all words' ids one after another, padded with 0; row 1 the end of each word in it, padded with -1. No
    words at all is [B, 2, 0].
    """
    if words is None or words.size == 0:
        return np.empty((batch, 2, 0), np.int32)
    rows = [[ids for word in row if (ids := tokenizer.encode_word(word))] for row in words.reshape(batch, -1)]
    width = max(1, *(sum(map(len, row)) for row in rows))
    result = np.empty((batch, 2, width), np.int32)
    result[:, 0], result[:, 1] = 0, -1
    for target, row in zip(result, rows, strict=True):
        flat = [token for ids in row for token in ids]
        target[0, : len(flat)] = flat
        target[1, : len(row)] = np.cumsum([len(ids) for ids in row])
    return result


def encode_bias(
    tokenizer: Tokenizer,
    words: npt.NDArray[np.object_] | None,
    weights: npt.NDArray[np.float32] | None,
    batch: int,
) -> npt.NDArray[np.float32]:
    """Words [B, n] and their weights [B, n] to a bias on the logits [B, vocabulary]; without words [B, 0].

    A weight counts for each token of its word, and adds up where words share one.
    """
    if words is None and weights is None:
        return np.empty((batch, 0), np.float32)
    if words is None or weights is None or words.shape != weights.shape:
        raise RequestError("embedding_bias_words and embedding_bias_weights must come together, one weight a word")
    bias = np.zeros((batch, tokenizer.vocab_size), np.float32)
    for target, row, row_weights in zip(bias, words.reshape(batch, -1), weights.reshape(batch, -1), strict=True):
        for word, weight in zip(row, row_weights, strict=True):
            np.add.at(target, tokenizer.encode_word(word), weight)
    return bias


def decode_batch(
    tokenizer: Tokenizer, tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]
) -> npt.NDArray[np.object_]:
    """Ids [B, beams, L] with lengths [B, beams] to texts [B * beams] in UTF-8: flat, as the clients read them."""
    batch, beams, longest = tokens.shape
    if lengths.shape != (batch, beams) or lengths.min(initial=0) < 0 or lengths.max(initial=0) > longest:
        raise RequestError(f"lengths {lengths.tolist()} do not fit tokens of shape {list(tokens.shape)}")
    if tokens.min(initial=0) < 0:
        raise RequestError(f"token {tokens.min()} is below 0")
    rows = zip(tokens.reshape(batch * beams, longest), lengths.reshape(-1), strict=True)
    texts = [tokenizer.decode(row[:length].tolist()).encode() for row, length in rows]
    return np.array(texts, np.object_)


def lighten_stub() -> None:
    """Makes the process of a text model small, and its start and end quick: to be called before anything is tokenized.
    Without effect outside a stub.

    transformers imports torch where it finds it, for tokenizers too, which need none of it: of a process's 183 MiB
    that is 130, and 7 of the 9 seconds that its start takes. And the interpreter's own tear-down is spared: with
    transformers it takes seconds, of Triton's exit time-out.
    """
    if "c_python_backend_utils" in sys.modules:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python's own mark of what is not to be found
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that it is missing
        atexit.register(os._exit, 0)


def is_draining() -> bool:
    """Whether the server takes no new request any more. `trtseek serve` says so; started otherwise, it never does."""
    mark = os.environ.get(DRAIN_MARK)
    return mark is not None and os.path.exists(mark)


def poll_seconds(requests: int) -> float:
    """Until it is asked again of each of so many requests whether its client has gone: for a few, a step or two of a
    model. Asking is a round trip of 50 microseconds: a fortieth of a core for up to 15 requests, a twentieth for more.
    """
    return max(0.01, min(0.002 * requests, 0.03), 0.001 * requests)


def read_parameters(args: dict[str, str]) -> dict[str, str]:
    """A model's own parameters from what Triton hands to `initialize`."""
    parameters = json.loads(args["model_config"]).get("parameters", {})
    return {key: value["string_value"] for key, value in parameters.items()}


def list_inputs(args: dict[str, str], served: Collection[str]) -> list[str]:
    """Those of a model that are served: several models have the same code, and not the same tensors."""
    declared = {tensor["name"] for tensor in json.loads(args["model_config"])["input"]}
    return [name for name in served if name in declared]


def resolve_path(args: dict[str, str], path: str) -> Path:
    """A path parameter, which is relative to the model's own folder. Triton names that folder, or the one above it. No
    link is followed: what is behind one may have a name that the stub's Python, which knows ASCII only, cannot spell.
    """
    folder = Path(args["model_repository"])
    if folder.name != args["model_name"]:
        folder = folder / args["model_name"]
    return folder / path


def read_flag(parameters: dict[str, str], key: str) -> bool:
    """A parameter that is true or false. Refuses anything else rather than guess."""
    try:
        return {"true": True, "false": False}[parameters[key].lower()]
    except KeyError:
        raise ValueError(f"parameter {key} must be true or false, not {parameters.get(key)!r}") from None
