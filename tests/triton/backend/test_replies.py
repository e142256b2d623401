"""Answers on their way out: first tokens and ends at once, the rest merged under load, nothing lost."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pipeline.errors import TrtseekError
from pipeline.runtime.errors import NonFiniteError, RequestError
from pipeline.runtime.handle import Handle, Update
from pipeline.runtime.request import FinishReason
from pipeline.triton.backend.replies import Outbox, Reply, TimeoutReachedError
from pipeline.triton.backend.requests import Wanted
from tests.triton.backend.updates import Running

NOTHING = Wanted(perf_metrics=False, num_input_tokens=False, num_output_tokens=False)


class Sender:
    """Keeps what it is to send; `way` is where all senders of a test wait until it is clear."""

    def __init__(self, log: list[tuple[str, Any, bool]], name: str, way: threading.Event) -> None:
        self.log, self.name, self.way = log, name, way
        self.waiting, self.broken, self.asked = threading.Event(), False, 0

    def send(self, arrays: Any, *, final: bool) -> None:
        self._send(arrays["output_ids"].reshape(-1).tolist(), final)

    def send_error(self, error: TrtseekError, *, final: bool, row: int | None = None) -> None:
        self._send((type(error), row), final)

    def send_final(self) -> None:
        self._send(None, True)

    def is_cancelled(self) -> bool:
        self.asked += 1
        return True

    def _send(self, what: Any, final: bool) -> None:
        self.waiting.set()
        assert self.way.wait(30)
        if self.broken:
            raise RuntimeError("Triton refuses it")
        self.log.append((self.name, what, final))


Tell = Callable[[Update], Any]


def start(reply: Reply, rows: Sequence[Running | TrtseekError], outbox: Outbox) -> list[Tell]:
    """What the executor calls with the updates of each row that is not refused."""
    tellers = []
    for row, running in enumerate(rows):

        def submit(tell: Tell, running: Running | TrtseekError = running) -> Handle:
            if isinstance(running, TrtseekError):
                raise running
            tellers.append(tell)
            return running.handle

        reply.start(row, submit, outbox)
    return tellers


class Post:
    """An outbox, and replies whose requests run as the test says."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any, bool]] = []
        self.done: list[Reply] = []
        self.errors: list[Exception] = []
        self.way = threading.Event()
        self.way.set()
        self.outbox = Outbox(self.errors.append)

    def reply(self, name: str, *rows: Running | TrtseekError) -> tuple[Reply, list[Tell]]:
        sender = Sender(self.log, name, self.way)
        reply = Reply(sender, len(rows), request_id="", wanted=NOTHING, on_done=self.done.append)
        return reply, start(reply, rows, self.outbox)

    def block(self) -> Running:
        """The outbox is busy with a response of another request until `way` is set again."""
        running = Running()
        self.way.clear()
        reply, (tell,) = self.reply("other", running)
        tell(running.step(0))
        assert isinstance(reply.sender, Sender) and reply.sender.waiting.wait(30)
        return running

    def of(self, name: str) -> list[tuple[Any, bool]]:
        """What was sent of a reply, once all is."""
        self.way.set()
        self.outbox.close()
        return [(what, final) for sender, what, final in self.log if sender == name]


@pytest.fixture
def post() -> Iterator[Post]:
    post = Post()
    yield post
    post.way.set()
    post.outbox.close()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_token_goes_out_at_once_while_the_outbox_keeps_up(post: Post) -> None:
    running = Running()
    _, (tell,) = post.reply("a", running)
    for count in range(1, 4):
        tell(running.step(count))
        wait_for(lambda count=count: len(post.log) == count)
    tell(running.end(4))
    assert post.of("a") == [([1], False), ([2], False), ([3], False), ([4], True)]
    assert len(post.done) == 1


def test_under_load_several_steps_share_a_response(post: Post) -> None:
    post.block()
    running = Running()
    _, (tell,) = post.reply("a", running)
    for token in range(1, 6):
        tell(running.step(token))
    assert post.of("a") == [([1, 2, 3, 4, 5], False)]


def test_first_tokens_and_ends_go_before_the_rest_in_their_order(post: Post) -> None:
    old, ending, new = Running(), Running(), Running()
    tellers = {name: post.reply(name, each)[1][0] for name, each in (("old", old), ("ending", ending))}
    tellers["old"](old.step(1))
    tellers["ending"](ending.step(1))
    wait_for(lambda: len(post.log) == 2)
    post.block()
    tellers["old"](old.step(2))
    tellers["ending"](ending.end(2))
    _, (tell,) = post.reply("new", new)
    tell(new.step(1))
    tell(new.step(2))
    post.of("new")
    assert post.log[2:] == [
        ("other", [0], False),
        ("ending", [2], True),
        ("new", [1, 2], False),
        ("old", [2], False),
    ]


def test_an_error_comes_after_the_tokens_before_it_and_ends_the_answer(post: Post) -> None:
    post.block()
    running = Running()
    _, (tell,) = post.reply("a", running)
    tell(running.step(1))
    tell(running.step(2))
    running.handle.on_update = tell
    running.handle.fail(NonFiniteError("the logits are not finite"))
    assert post.of("a") == [([1, 2], False), ((NonFiniteError, None), True)]
    assert len(post.done) == 1


def test_a_refused_row_fails_alone(post: Post) -> None:
    running = Running()
    reply, (tell,) = post.reply("a", RequestError("max_tokens", "is 0"), running)
    wait_for(lambda: post.log)
    assert not reply.done
    tell(running.end(1))
    assert post.of("a") == [((RequestError, 0), False), ([1], True)]


def test_a_request_refused_as_a_whole_has_one_response(post: Post) -> None:
    post.reply("a", RequestError("max_tokens", "is 0"))
    assert post.of("a") == [((RequestError, None), True)]
    assert len(post.done) == 1


def test_the_tokens_until_a_request_s_time_was_over_are_sent_before_it_is_said(post: Post) -> None:
    post.block()
    running = Running()
    _, (tell,) = post.reply("a", running)
    tell(running.step(1))
    tell(running.end(reason=FinishReason.TIMED_OUT))
    assert post.of("a") == [([1], False), ((TimeoutReachedError, None), True)]


def test_an_end_that_finds_nothing_to_say_is_said(post: Post) -> None:
    running = Running()
    _, (tell,) = post.reply("a", running)
    tell(running.step(1))
    wait_for(lambda: post.log)
    tell(running.end(reason=FinishReason.CANCELLED))
    assert post.of("a") == [([1], False), ([], True)]


def test_a_response_that_triton_refuses_ends_its_request_and_no_other(post: Post) -> None:
    bad, good = Running(), Running()
    reply, (tell,) = post.reply("bad", bad)
    assert isinstance(reply.sender, Sender)
    reply.sender.broken = True
    tell(bad.step(1))
    wait_for(lambda: post.errors)
    _, (tell,) = post.reply("good", good)
    tell(good.end(1))
    assert post.of("good") == [([1], True)]
    assert [str(error) for error in post.errors] == ["Triton refuses it"]
    assert bad.cancelled == 1


def test_nobody_asks_after_the_client_once_the_answer_has_ended(post: Post) -> None:
    running = Running()
    reply, (tell,) = post.reply("a", running)
    assert reply.is_cancelled()
    tell(running.end(1))
    post.of("a")
    assert not reply.is_cancelled()
    assert isinstance(reply.sender, Sender)
    assert reply.sender.asked == 1


class Sent:
    """Puts the responses of a reply together again, as a client does."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.log_probs: dict[tuple[int, int], list[float]] = {}
        self.finals: list[bool] = []

    def send(self, arrays: Any, *, final: bool) -> None:
        key = (arrays["batch_index"].item(), arrays["sequence_index"].item())
        self.tokens.setdefault(key, []).extend(arrays["output_ids"][0, 0].tolist())
        self.log_probs.setdefault(key, []).extend(arrays["output_log_probs"][0, 0].tolist())
        self.finals.append(final)

    def send_error(self, error: TrtseekError, *, final: bool, row: int | None = None) -> None:
        self.finals.append(final)

    def send_final(self) -> None:
        self.finals.append(True)

    def is_cancelled(self) -> bool:
        return False


class Unsent(Outbox):
    """For a test that sends by itself."""

    def __init__(self) -> None: ...

    def put(self, reply: Reply, *, urgent: bool) -> None: ...


def test_nothing_is_lost_whenever_it_is_sent() -> None:
    """Any order of rows, sequences, steps and sending: each sequence's tokens in order, and one end, the last."""
    for seed in range(200):
        rng = random.Random(seed)
        rows = [Running(sequences=rng.randrange(1, 3), return_log_probs=True) for _ in range(rng.randrange(1, 4))]
        sender, done = Sent(), list[Reply]()
        reply = Reply(sender, len(rows), request_id="", wanted=NOTHING, on_done=done.append)
        tellers = start(reply, rows, Unsent())
        left = [(row, sequence) for row, running in enumerate(rows) for sequence in range(len(running.result.outputs))]
        for token in itertools.count():
            row, sequence = place = rng.choice(left)
            reason, is_final = None, False
            if rng.random() < 0.3:
                left.remove(place)
                reason, is_final = FinishReason.LENGTH, row not in [other for other, _ in left]
            tellers[row](rows[row].step(token, sequence=sequence, reason=reason, is_final=is_final))
            if rng.random() < 0.5 or not left:
                reply.send()
            if not left:
                break
        outputs = {(row, i): each for row, running in enumerate(rows) for i, each in enumerate(running.result.outputs)}
        assert sender.tokens == {place: output.tokens for place, output in outputs.items()}
        assert sender.log_probs == {place: output.log_probs for place, output in outputs.items()}
        assert sender.finals[-1] and not any(sender.finals[:-1])
        assert done == [reply]


def test_who_has_all_that_was_wanted_gives_up_no_row(post: Post) -> None:
    rows = Running(), Running()
    reply, _ = post.reply("a", *rows)
    reply.finish()
    assert [(row.completed, row.cancelled) for row in rows] == [(1, 0), (1, 0)]
