"""The socket between the text path and the executor's process, both ends in this one."""

from __future__ import annotations

import importlib
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from model_repo import trtseek_wire as wire
from pipeline.errors import PackageError
from pipeline.runtime.errors import RequestError
from pipeline.triton import MODEL_REPO
from pipeline.triton.backend import door as doors
from pipeline.triton.backend.door import Door, DoorSender

ARRAYS = st.sampled_from(["<i4", "<u8", "<f4", "|b1", "<i8"]).flatmap(
    lambda kind: arrays_of.arrays(kind, arrays_of.array_shapes(min_dims=0, min_side=0))
)


@pytest.fixture(scope="module", autouse=True)
def child() -> Iterator[Any]:
    """As the stub finds it: beside the model's code."""
    sys.path.insert(0, str(MODEL_REPO))
    names = ("trtseek_wire", "trtseek_child")
    yield [importlib.import_module(name) for name in names][1]
    sys.path.remove(str(MODEL_REPO))
    for name in names:
        sys.modules.pop(name, None)


class Reply:
    """What a door cancels."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.told: list[str] = []

    def cancel(self) -> None:
        self.told.append("cancel")
        self.cancelled.set()

    def finish(self) -> None:
        self.told.append("finish")


class House:
    """A door, and who stands behind it: `answer` is called in a thread of its own, as an executor answers."""

    def __init__(self, answer: Callable[[DoorSender, Reply, Any], object]) -> None:
        self.model, self._answer = f"test-{uuid.uuid4().hex}", answer
        self.replies: list[Reply] = []
        self.asked: list[tuple[Any, Any]] = []
        self.door = Door(self.model, self._accept)

    def _accept(self, head: Any, arrays: Any, sender: DoorSender) -> Any:
        reply = Reply()
        self.replies.append(reply)
        self.asked.append((head, arrays))
        threading.Thread(target=self._answer, args=(sender, reply, arrays), daemon=True).start()
        return reply

    def __enter__(self) -> House:
        return self

    def __exit__(self, *_: object) -> None:
        self.door.close()


def one(value: int) -> dict[str, Any]:
    return {"x": np.array([[value]], np.int32)}


def values(responses: Any) -> list[int]:
    return [int(arrays["x"].item()) for arrays in responses]


@given(st.dictionaries(st.text(max_size=5), ARRAYS), st.integers(1, 9))
def test_messages_arrive_in_any_pieces(arrays: dict[str, Any], size: int) -> None:
    stream = wire.pack({"a": 1}, arrays) + wire.pack({"b": [None]})
    unpacker, found = wire.Unpacker(), []
    for start in range(0, len(stream), size):
        found += unpacker.feed(stream[start : start + size])
    (first, got), (second, nothing) = found
    assert (first, second, nothing) == ({"a": 1}, {"b": [None]}, {})
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert got[name].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "head", [b'{"arrays": [["x", "|O", [1]]]}', b'{"arrays": [["x", "<i4", [9]]]}', b"{", b"{}", b"[1]"]
)
def test_what_is_no_message_is_refused(head: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        list(wire.Unpacker().feed(wire._LENGTHS.pack(len(head), 4) + head + b"1234"))


def test_responses_come_one_by_one_until_the_last(child: Any) -> None:
    def answer(sender: DoorSender, reply: Reply, arrays: Any) -> None:
        for value in range(3):
            sender.send(one(10 * value + int(arrays["n"].item())), final=value == 2)

    with House(answer) as house:
        asked = child.Conversation(house.model).ask({"parameters": {"p": "P0"}}, {"n": np.array([7])})
        assert values(asked) == [7, 17, 27]
        assert house.asked[0][0] == {"parameters": {"p": "P0"}}


def test_an_error_is_told_after_what_came_before_it(child: Any) -> None:
    def answer(sender: DoorSender, reply: Reply, arrays: Any) -> None:
        sender.send(one(1), final=False)
        sender.send_error(RequestError("seed", "is 5", hint="another"), final=True, row=2)

    with House(answer) as house:
        asked = child.Conversation(house.model).ask({}, {})
        assert next(asked)["x"].item() == 1
        with pytest.raises(child.ChildError, match=r"row 2: seed is 5 \(another\)") as caught:
            next(asked)
        assert caught.value.code == "INVALID_ARG"


def test_who_stops_is_still_told_the_end(child: Any) -> None:
    def answer(sender: DoorSender, reply: Reply, arrays: Any) -> None:
        sender.send(one(1), final=False)
        reply.cancelled.wait()
        sender.send(one(2), final=True)

    with House(answer) as house:
        conversation = child.Conversation(house.model)
        asked = conversation.ask({}, {})
        assert next(asked)["x"].item() == 1
        conversation.stop()
        conversation.stop()  # twice does no harm
        assert values(asked) == [2]


def test_who_has_all_that_was_wanted_says_so(child: Any) -> None:
    """Before the connection is closed, which would otherwise count as a request that was given up."""

    def answer(sender: DoorSender, reply: Reply, arrays: Any) -> None:
        sender.send(one(1), final=False)
        reply.cancelled.wait()
        sender.send(one(2), final=True)

    for leave, told in (("finish", ["finish", "cancel"]), ("stop", ["cancel"])):
        with House(answer) as house:
            conversation = child.Conversation(house.model)
            asked = conversation.ask({}, {})
            assert next(asked)["x"].item() == 1
            getattr(conversation, leave)()
            getattr(conversation, leave)()
            assert values(asked) == [2]
            assert len(house.replies) == 1 and house.replies[0].told == told


def test_who_goes_away_is_not_answered(child: Any) -> None:
    ended = threading.Event()

    def answer(sender: DoorSender, reply: Reply, arrays: Any) -> None:
        reply.cancelled.wait()
        assert sender.is_cancelled()
        for _ in range(100):
            sender.send(one(1), final=False)
        sender.send_final()
        ended.set()

    with House(answer) as house:
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(wire.name_socket(house.model))
        caller.sendall(wire.pack({}, {}))
        caller.close()
        ended.wait()


def test_noise_is_dismissed_and_others_are_served(child: Any) -> None:
    with House(lambda sender, reply, arrays: sender.send(one(1), final=True)) as house:
        noisy = socket.socket(socket.AF_UNIX)
        noisy.connect(wire.name_socket(house.model))
        noisy.sendall(wire._LENGTHS.pack(3, 0) + b"abc")
        assert noisy.recv(1) == b""
        noisy.close()
        assert values(child.Conversation(house.model).ask({}, {})) == [1]


def test_many_at_once(child: Any) -> None:
    def answer(sender: DoorSender, reply: Reply, arrays: Any) -> None:
        for value in range(20):
            sender.send(one(int(arrays["n"].item()) + value), final=value == 19)

    seen: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        seen[number] = values(child.Conversation(house.model).ask({}, {"n": np.array([100 * number])}))

    with House(answer) as house:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {number: [100 * number + value for value in range(20)] for number in range(40)}


def test_a_model_that_is_not_there(child: Any) -> None:
    with pytest.raises(child.ChildError, match="cannot be reached") as caught:
        list(child.Conversation(f"test-{uuid.uuid4().hex}").ask({}, {}))
    assert caught.value.code == "UNAVAILABLE"


def test_a_process_that_ends_in_the_middle(child: Any) -> None:
    def answer(sender: DoorSender, reply: Reply, arrays: Any) -> None:
        sender.send(one(1), final=False)
        sender.leave(unanswered=True)  # as the kernel does with a dead process's connections

    with House(answer) as house:
        asked = child.Conversation(house.model).ask({}, {})
        assert next(asked)["x"].item() == 1
        with pytest.raises(child.ChildError, match="closed the connection"):
            next(asked)


def test_one_process_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "BIND_S", 0.0)
    with House(lambda *_: None) as house, pytest.raises(PackageError, match="taken"):
        Door(house.model, lambda *_: None)


def test_a_process_of_another_parent_is_turned_away(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with House(lambda sender, reply, arrays: sender.send(one(1), final=True)) as house:
        monkeypatch.setattr(doors, "is_sibling", lambda _: False)
        with pytest.raises(child.ChildError):
            list(child.Conversation(house.model).ask({}, {}))
    assert house.asked == []
