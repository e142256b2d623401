"""A runner without a network, a sampler without vectors, and what both say a request's answer must be.

FakeRunner follows the declaration of the step inputs to the letter: it keeps tokens in a block pool where a network
would keep keys and values, and a row's logits are a function of the tokens that it reads back through the block table.
A wrong table, a missed copy, a block shared or reused too early, and a block that was not zeroed all change an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.runtime.noise import draw_uniforms
from pipeline.runtime.request import FinishReason, Request
from pipeline.runtime.sampling import Sampling

VOCABULARY = 40
POISON = 39  # a token after which nothing is finite
UNWRITTEN = 0.0


def fake_logits(history: Sequence[int], vocabulary: int = VOCABULARY) -> np.ndarray:
    """Any fixed function of all tokens so far."""
    digest = hashlib.blake2b(np.array(history, np.int64).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 2, vocabulary).astype(np.float32)


class FakeRunner:
    """`broken`: steps that raise, by number. `log`: (tokens, sequences, longest chunk) of each step."""

    def __init__(self, block_size: int, vocabulary: int = VOCABULARY) -> None:
        self.block_size, self.vocabulary = block_size, vocabulary
        self.broken: set[int] = set()
        self.cannot_zero = False
        self.steps = 0
        self.log: list[tuple[int, int, int]] = []
        self.zeroed: list[int] = []
        self.allocations = 0

    def allocate(self, blocks: int) -> None:
        self.pool = np.full((blocks, self.block_size), UNWRITTEN)
        self.allocations += 1

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*pairs, strict=True)
        self.pool[list(targets)] = self.pool[list(sources)]

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        if self.cannot_zero:
            raise RuntimeError("no memory")
        self.pool[list(blocks)] = UNWRITTEN
        self.zeroed += blocks

    def read_blocks(self, blocks: Sequence[int]) -> Any:
        raise NotImplementedError

    def write_blocks(self, blocks: Sequence[int], content: Any) -> None:
        raise NotImplementedError

    def step(self, inputs: dict[str, np.ndarray]) -> torch.Tensor:
        self.steps += 1
        if self.steps in self.broken:
            raise RuntimeError("the device fell off the bus")
        batch, longest = inputs["pad_index"].shape
        self.log.append((len(inputs["input_ids"]), batch, longest))
        row = 0
        for block in range(len(self.pool)):
            for i in range(inputs["update_lengths"][block + 1] - inputs["update_lengths"][block]):
                token = inputs["input_ids"][row]
                # Zero means unwritten, so tokens are kept one higher.
                self.pool[block, inputs["write_indices"][block] + i] = np.nan if token == POISON else token + 1
                row += 1
        return torch.from_numpy(np.stack([self._logits(inputs, r) for r in inputs["logit_rows"]]))

    def _logits(self, inputs: dict[str, np.ndarray], row: int) -> np.ndarray:
        table = inputs["block_tables"][inputs["unpad_index"][row] // inputs["pad_index"].shape[1]]
        content = self.pool[table].reshape(-1)
        if np.isnan(content).any():  # also behind the mask: 0 * NaN
            return np.full(self.vocabulary, np.nan, np.float32)
        history = content[: inputs["slot_ids"][row] + 1]
        assert (history != UNWRITTEN).all(), "a row reads what nobody wrote"
        return fake_logits(history.astype(np.int64) - 1, self.vocabulary)


def sample_slowly(logits: np.ndarray, sampling: Sampling, history: list[int], prompt: int, **place: int) -> int | None:
    """One row, one operation at a time; None where nothing is left. place: seed, index, end_id."""
    logits = logits.astype(np.float32).copy()
    end_id = place.get("end_id", -1)
    if sampling.embedding_bias is not None:
        logits += sampling.embedding_bias
    for token in set(history):
        value, penalty = logits[token], np.float32(sampling.repetition_penalty)
        value = value * penalty if value < 0 else value / penalty
        value -= np.float32(sampling.presence_penalty)
        logits[token] = value - np.float32(sampling.frequency_penalty) * np.float32(history.count(token))
    for word in sampling.bad_words:
        if len(word) == 1 or tuple(history[-len(word) + 1 :]) == word[:-1]:
            logits[word[-1]] = -np.inf
    if end_id >= 0 and len(history) - prompt < sampling.min_tokens:
        logits[end_id] = -np.inf
    if logits.max() == -np.inf:
        return None
    top_p = sampling.top_p
    for token in history[prompt:]:
        if top_p > 0:
            decayed = max(top_p * sampling.top_p_decay, sampling.top_p_min)
            top_p = sampling.top_p if token == sampling.top_p_reset_id else decayed
    if sampling.temperature == 0 or sampling.top_k == 1 or (sampling.top_k == 0 and sampling.top_p == 0):
        return int(np.argmax(logits))
    scores = (logits - logits.max()) / np.float32(sampling.temperature)
    weights = torch.from_numpy(scores).exp().double().numpy()
    order = sorted(range(len(weights)), key=lambda token: (-scores[token], token))
    narrow = 0 < sampling.top_k < len(weights) or 0 < top_p < 1
    kept = order if narrow else list(range(len(weights)))
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    if 0 < top_p < 1:
        mass, before, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if before < float(np.float32(top_p)) * mass:
                nucleus.append(token)
            before += weights[token]
        kept = nucleus
    kept = [token for token in kept if weights[token] >= np.float32(sampling.min_p)]
    numbers = (place.get("seed", 0), place.get("index", 0), len(history) - prompt)
    (uniform,) = draw_uniforms(*(np.array([number], np.uint64) for number in numbers))
    target, before = uniform * sum(weights[token] for token in kept), 0.0
    for token in sorted(kept):
        before += weights[token]
        if before > target:
            return token
    raise AssertionError("unreachable: the target is below the sum")


def answer_slowly(request: Request, index: int = 0, vocabulary: int = VOCABULARY) -> tuple[list[int], FinishReason]:
    """The answer of a fake network to one request, alone."""
    history, prompt = list(request.input_ids), len(request.input_ids)
    seed = request.sampling.seed or 0
    while True:
        place = {"seed": seed, "index": index, "end_id": request.end_id}
        token = sample_slowly(fake_logits(history, vocabulary), request.sampling, history, prompt, **place)
        assert token is not None
        if token == request.end_id:
            return history[prompt:], FinishReason.END_ID
        history.append(token)
        if any(tuple(history[-len(word) :]) == word for word in request.stop_words):
            return history[prompt:], FinishReason.STOP_WORDS
        if len(history) - prompt == request.max_tokens:
            return history[prompt:], FinishReason.LENGTH


def log_probs_slowly(tokens: Sequence[int], start: int) -> list[float]:
    """Of the tokens from `start` on, each after all before it."""
    rows = [torch.from_numpy(fake_logits(tokens[:place])).log_softmax(-1) for place in range(start, len(tokens))]
    return [row[token].item() for row, token in zip(rows, tokens[start:], strict=True)]
