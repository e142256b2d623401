"""A request, as the `tensorrt_llm` model's tensors carry it, and how it can end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from pipeline.runtime.errors import RequestError
from pipeline.runtime.retention import Retention
from pipeline.runtime.sampling import Sampling, Words, check_range, check_words

MAX_INT = 2**31 - 1


class Priority(IntEnum):
    """A lower class gives way to a higher one. P0 is the highest."""

    P0 = 0
    P1 = 1
    P2 = 2


class FinishReason(Enum):
    """Why a sequence ended."""

    END_ID = "end_id"
    STOP_WORDS = "stop_words"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Raises RequestError, naming the field, for what no executor could run; `check_request` for what this one cannot.

    input_ids: the prompt, at least one token.
    max_tokens: at most so many are generated, the end id not counted.
    request_id: for `stop` and for messages; "" gets one of its own.
    end_id: ends a sequence and is not part of it; -1 for none. pad_id: what fills up answers of unequal length, for
        whoever puts them into one array; -1 takes end_id.
    stop_words: sequences of tokens that end a sequence and stay part of it. They may begin in the prompt.
    num_return_sequences: so many sequences are drawn from one prompt, each with random numbers of its own.
    return_log_probs: of the tokens generated, as the network gave them (before bias, penalties and temperature).
    return_context_log_probs: of the prompt's tokens, from its second on.
    return_context_logits, return_generation_logits: float32 rows on the host. With context logits or log-probs the
        prompt is computed whole, without blocks shared with other requests.
    streaming: tokens come as they are made; otherwise a sequence comes whole when it ends.
    exclude_input_in_output: see `Update.output_ids`.
    priority: see Priority. queue_timeout: seconds until the first step, then QueueTimeoutError. timeout: seconds from
        arrival to the end, then what there is comes with TIMED_OUT. None for no limit.
    cache_salt: requests share blocks only with others of the same salt (tenants that must not learn of each other).
    retention: how long its cached blocks are worth keeping; None: as any others.
    """

    input_ids: tuple[int, ...]
    max_tokens: int
    request_id: str = ""
    end_id: int = -1
    pad_id: int = -1
    sampling: Sampling = field(default_factory=Sampling)
    stop_words: Words = ()
    num_return_sequences: int = 1
    beam_width: int = 1
    return_log_probs: bool = False
    return_context_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    streaming: bool = False
    exclude_input_in_output: bool = False
    priority: Priority = Priority.P1
    queue_timeout: float | None = None
    timeout: float | None = None
    cache_salt: str = ""
    retention: Retention | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", tuple(int(token) for token in self.input_ids))
        if not self.input_ids:
            raise RequestError("input_ids", "is empty", hint="a prompt has at least one token; a BOS token will do")
        if min(self.input_ids) < 0:
            raise RequestError("input_ids", f"holds the token {min(self.input_ids)}")
        check_range("max_tokens", self.max_tokens, 1, MAX_INT, int)
        check_range("num_return_sequences", self.num_return_sequences, 1, MAX_INT, int)
        check_range("end_id", self.end_id, -1, MAX_INT, int)
        check_range("pad_id", self.pad_id, -1, MAX_INT, int)
        if self.beam_width != 1:
            raise RequestError(
                "beam_width",
                f"is {self.beam_width}, and beams are not searched",
                hint="leave it at 1; num_return_sequences draws several sequences",
            )
        for name in ("queue_timeout", "timeout"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, 1e9, float)
        if self.priority not in set(Priority):
            raise RequestError("priority", f"is {self.priority!r}", hint="0, 1 or 2; 0 comes first")
        object.__setattr__(self, "priority", Priority(self.priority))
        object.__setattr__(self, "stop_words", check_words("stop_words", self.stop_words))

    @property
    def wants_context(self) -> bool:
        """Whether logits of all the prompt's rows are needed."""
        return self.return_context_logits or self.return_context_log_probs


def check_request(request: Request, *, vocab_size: int, max_seq_len: int) -> None:
    """Raises RequestError for what does not fit the network: tokens outside its vocabulary, too long a sequence."""
    prompt = len(request.input_ids)
    if prompt + request.max_tokens > max_seq_len:
        raise RequestError(
            "max_tokens",
            f"is {request.max_tokens}, after a prompt of {prompt} tokens: at most {max_seq_len} are served",
            hint="shorten the prompt, ask for fewer tokens, or raise stages.build.max_seq_len",
        )
    words = request.stop_words + request.sampling.bad_words
    tokens = {
        "input_ids": max(request.input_ids),
        "end_id": request.end_id,
        "stop_words or bad_words": max((max(word) for word in words), default=-1),
    }
    for name, token in tokens.items():
        if token >= vocab_size:
            raise RequestError(name, f"holds the token {token}, outside the vocabulary of {vocab_size}")
    bias = request.sampling.embedding_bias
    if bias is not None and len(bias) != vocab_size:
        raise RequestError("embedding_bias", f"has {len(bias)} entries, the vocabulary {vocab_size}")
