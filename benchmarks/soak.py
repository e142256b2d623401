"""Hours of a bad day in minutes: load that comes and goes, clients that cancel, vanish, and send what is no request."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.load import Usage, make_query
from pipeline.errors import TrtseekError
from pipeline.triton.client import Client
from pipeline.triton.query import Query
from pipeline.triton.server import TritonServer

CLIENTS = 24
HUGE = Query(text="x" * (8 << 20), options={"max_tokens": 4})
LONGEST = 96
# Memory may settle after the first minutes; from then on it may grow by this share.
GROWTH = 0.10
WARM_S = 30.0


class LeaveError(Exception):
    """A client that has seen enough."""


def soak(
    url: str,
    server: TritonServer,
    usage: Callable[[], Mapping[str, Usage]],
    *,
    prompts: Sequence[Sequence[int]],
    minutes: float,
) -> bool:
    """Whether nothing leaked and every answer that came whole was the one that its prompt gets alone."""
    with Client(url) as client:
        expected = [client.ask(make_query(prompt, LONGEST), timeout=600).output_ids for prompt in prompts]
    counts: Counter[str] = Counter()
    end = time.monotonic() + 60 * minutes
    threads = [
        threading.Thread(target=_visit, args=(url, server, prompts, expected, end, random.Random(seed), counts))
        for seed in range(CLIENTS)
    ]
    stubs = dict(server.stubs)
    for thread in threads:
        thread.start()
    time.sleep(min(WARM_S, 20 * minutes))
    _fill_buffers(url)
    before = usage()
    for thread in threads:
        thread.join()
    after = usage()
    problems = [f"{name} {count} times" for name, count in counts.items() if name.startswith("wrong")]
    if server.stubs.keys() != stubs.keys():
        problems.append("a model's process is not the one that it was")
    for name, was in before.items():
        if (now := after.get(name)) is None:
            problems.append(f"{name} has ended")
            continue
        print(f"    {name}: {was.memory >> 20} MiB, then {now.memory >> 20} MiB; {was.files} files, then {now.files}")
        if now.memory > was.memory * (1 + GROWTH) + (16 << 20):
            problems.append(f"{name} grew from {was.memory >> 20} to {now.memory >> 20} MiB")
        if now.files > was.files + 64:
            problems.append(f"{name} has {now.files} open files, and had {was.files}")
    if (used := _wait_for_idle(server)) != 0:
        problems.append(f"{used:g} blocks are still held")
    with Client(url) as client:
        for prompt, tokens in zip(prompts, expected, strict=True):
            if client.ask(make_query(prompt, LONGEST), timeout=600).output_ids != tokens:
                problems.append("an answer changed")
    print(f"soak of {minutes:g} min: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}")
    for problem in problems:
        print(f"    LEAK OR FAULT: {problem}")
    return not problems


def _fill_buffers(url: str) -> None:
    """As many of the largest requests at a time as there are clients: what the server keeps of such is no leak, but the
    mark up to which its buffers were once filled."""

    def send() -> None:
        with Client(url) as client, contextlib.suppress(TrtseekError):
            client.ask(HUGE, timeout=600)

    for _ in range(2):
        threads = [threading.Thread(target=send) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _visit(
    url: str,
    server: TritonServer,
    prompts: Sequence[Sequence[int]],
    expected: list[list[int]],
    end: float,
    generator: random.Random,
    counts: Counter[str],
) -> None:
    acts = [
        (_ask_whole, 10),
        (_cancel, 4),
        (_vanish, 2),
        (_ask_malformed, 2),
        (_ask_too_much, 2),
    ]
    while time.monotonic() < end:
        (act,) = generator.choices([act for act, _ in acts], [weight for _, weight in acts])
        place = generator.randrange(len(prompts))
        try:
            counts[act(url, server, prompts[place], expected[place], generator)] += 1
        except (TrtseekError, OSError, http.client.HTTPException) as error:
            counts[f"wrong: {act.__name__.lstrip('_')} met {str(error)[:80]!r}"] += 1
        # The load comes and goes: everybody rests in the same third of each minute.
        if time.monotonic() % 60 > 40:
            time.sleep(generator.random() * 2)


def _ask_whole(url: str, _: TritonServer, prompt: Sequence[int], tokens: list[int], generator: random.Random) -> str:
    count = generator.randrange(1, LONGEST)
    with Client(url) as client:
        answer = client.ask(make_query(prompt, count, priority_class=f"P{generator.randrange(3)}"), timeout=600)
    return "answered" if answer.output_ids == tokens[:count] else "wrong answers"


def _cancel(url: str, _: TritonServer, prompt: Sequence[int], __: Sequence[int], generator: random.Random) -> str:
    left = generator.randrange(1, 5)

    def look(_: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise LeaveError

    query = Query(text="word " * min(len(prompt), 8), options={"max_tokens": LONGEST, "end_id": -1})
    with Client(url) as client, contextlib.suppress(LeaveError):
        client.ask(query, on_text=look, timeout=600)
    return "cancelled"


def _vanish(_: str, server: TritonServer, prompt: Sequence[int], __: Sequence[int], generator: random.Random) -> str:
    body = {"text_input": "word " * min(len(prompt), 8), "max_tokens": LONGEST, "end_id": -1, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.addresses.http, timeout=600)
    connection.request("POST", "/v2/models/tensorrt_llm_bls/generate_stream", json.dumps(body))
    if generator.random() < 0.5:
        connection.getresponse().read(16)
    connection.close()
    return "vanished"


def _ask_malformed(
    _: str, server: TritonServer, __: Sequence[int], ___: Sequence[int], generator: random.Random
) -> str:
    bodies: list[Any] = [b"{", b"[]", b"\xff", b'{"text_input": 5}', b'{"text_input": "a", "max_tokens": "many"}']
    connection = http.client.HTTPConnection("127.0.0.1", server.addresses.http, timeout=600)
    connection.request("POST", "/v2/models/tensorrt_llm_bls/generate", generator.choice(bodies))
    status = connection.getresponse().status
    connection.close()
    return "malformed and refused" if status >= 400 else "wrong: malformed and accepted"


def _ask_too_much(url: str, _: TritonServer, prompt: Sequence[int], __: Sequence[int], generator: random.Random) -> str:
    queries = [
        HUGE,
        make_query(prompt, 10**9),
        make_query([7] * 200_000, 4),
        make_query([2**31 - 1], 4),
    ]
    with Client(url) as client:
        try:
            client.ask(generator.choice(queries), timeout=600)
        except TrtseekError:
            return "huge and refused"
    return "wrong: huge and accepted"


def _wait_for_idle(server: TritonServer, seconds: float = 30.0) -> float:
    """The blocks in use when the server has come to rest."""
    end, used = time.monotonic() + seconds, -1.0
    while time.monotonic() < end:
        lines = [line for line in server.control.metrics().splitlines() if 'kv_cache_block_type="used"' in line]
        used = float(lines[0].rpartition(" ")[2])
        if used == 0:
            break
        time.sleep(0.5)
    return used
