"""Load on a running server: many clients at once, each on a connection of its own, and what they saw."""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import TrtseekError
from pipeline.triton.client import Answer, Client
from pipeline.triton.query import Query


@dataclass(frozen=True, slots=True)
class Job:
    """A query, and the seconds after the start at which it is sent; 0 for as soon as a client is free."""

    query: Query
    due: float = 0.0


@dataclass(slots=True)
class Seen:
    """An answer or an error; `waited`: how much later than due the query was sent."""

    job: Job
    answer: Answer | None
    error: TrtseekError | None
    waited: float = 0.0

    @property
    def time_to_first(self) -> float:
        assert self.answer is not None and self.answer.time_to_first is not None, self.error
        return self.answer.time_to_first + self.waited


def run_jobs(url: str, jobs: Sequence[Job], clients: int) -> tuple[list[Seen], float]:
    """Runs jobs in order over so many clients; what each saw, and the seconds in all."""
    seen: list[Seen | None] = [None] * len(jobs)
    places = iter(range(len(jobs)))
    lock = threading.Lock()
    began = time.monotonic()

    def work() -> None:
        with Client(url) as client:
            while True:
                with lock:
                    place = next(places, None)
                if place is None:
                    return
                job = jobs[place]
                time.sleep(max(0.0, began + job.due - time.monotonic()))
                waited = time.monotonic() - began - job.due if job.due else 0.0
                try:
                    seen[place] = Seen(job, client.ask(job.query, timeout=600), None, waited)
                except TrtseekError as error:
                    seen[place] = Seen(job, None, error, waited)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [one for one in seen if one is not None], time.monotonic() - began


def tokens_in(seen: Sequence[Seen]) -> int:
    return sum(len(one.answer.output_ids or ()) for one in seen if one.answer is not None)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def make_query(prompt: Sequence[int], tokens: int, **parameters: str | int) -> Query:
    """Greedy, and never ended by the model itself, so that every run has the same work."""
    return Query(input_ids=prompt, options={"max_tokens": tokens, "end_id": -1}, parameters=parameters)


def random_prompt(generator: random.Random, length: int, vocabulary: int) -> list[int]:
    return [generator.randrange(16, vocabulary) for _ in range(length)]


def arrivals(generator: random.Random, rate: float, seconds: float) -> list[float]:
    """A Poisson process: times at which queries arrive, so many a second on average."""
    times, now = [], 0.0
    while (now := now + generator.expovariate(rate)) < seconds:
        times.append(now)
    return times


@dataclass(slots=True)
class Usage:
    """Of a process: CPU seconds, bytes of its own memory (what is shared with others grows with the largest request and
    stays), open files."""

    cpu: float
    memory: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text()
        (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        ticks = int(fields[11]) + int(fields[12])
        return cls(ticks / 100, int(kilobytes) << 10, len(list(Path(f"/proc/{pid}/fd").iterdir())))


@contextmanager
def counting(usage: Callable[[], Mapping[str, Usage]], spent: dict[str, float]) -> Iterator[None]:
    """Puts into `spent` the CPU seconds that each process used meanwhile."""
    before = usage()
    yield
    after = usage()
    spent.update({name: after[name].cpu - before[name].cpu for name in before if name in after})


def summarize(name: str, ratio: float, bar: float, details: Mapping[str, Any]) -> bool:
    """Prints a part's result; whether it holds its bar."""
    print(f"{name}: {ratio:.2f}x (bar {bar:g}x) {'holds' if ratio >= bar else 'MISSED'}")
    for key, value in details.items():
        print(f"    {key}: {value}")
    return ratio >= bar
