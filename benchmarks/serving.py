"""The server under load: a package in a real tritonserver, asked over gRPC by clients on the same machine.

    python -m benchmarks.serving                        # every part but the soak; exit status 1 where a bar is missed
    python -m benchmarks.serving --quick                # the same in about two minutes, for a look
    python -m benchmarks.serving streams prefix         # some parts
    python -m benchmarks.serving soak --minutes 10

The package is that of `make smollm2 && make engine CONFIG=smollm2-int4.yaml`, or --package's. Token ids in, token ids
out, greedy, and no end id, so that the work is the same on both sides of a ratio. Both sides run in turn in one server.

    streams    tokens a second of 16 streams against 1
    batching   in-flight against static batching: groups of 16, all rows computed until the longest answer is done
    prefix     mean time to first token at 16 requests with one prefix of 512 tokens, shared against not shared
    priority   P99 time to first token of class P0 against that of one plain queue, where the queue's has tripled
    overhead   CPU time per token outside the network; time to first token over Triton against the executor itself
    soak       changing load with cancels, disconnects, malformed and huge requests: leaks, and wrong answers
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.load import (
    Job,
    Usage,
    arrivals,
    counting,
    make_query,
    percentile,
    random_prompt,
    run_jobs,
    summarize,
    tokens_in,
)
from benchmarks.packages import read_vocabulary, serving
from pipeline.triton.package import find_package
from pipeline.triton.query import Query
from pipeline.triton.server import TritonServer

STREAMS = 16
# Of an idle network: about what a step of 16 streams takes.
STEP_S = 0.05


@dataclass(frozen=True)
class Bench:
    """A running server. scale: 1 for the whole measure, less for a look."""

    server: TritonServer
    package: Path
    scale: float
    generator: random.Random
    vocabulary: int

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server.addresses.grpc}"

    @property
    def rounds(self) -> int:
        return max(1, round(3 * self.scale))

    def usage(self) -> dict[str, Usage]:
        """Of the server's processes, by model; the server itself as "tritonserver"."""
        assert self.server.pid is not None
        found = {"tritonserver": Usage.of(self.server.pid)}
        for pid, command in self.server.stubs.items():
            model = command.split("/1/model.py")[0].rpartition("/")[2]
            found[model] = Usage.of(pid)
        return found

    def prompt(self, length: int) -> list[int]:
        return random_prompt(self.generator, length, self.vocabulary)


def measure_streams(bench: Bench) -> bool:
    tokens = max(16, round(96 * bench.scale))
    speeds: dict[int, list[float]] = {1: [], STREAMS: []}
    run_jobs(bench.url, [Job(make_query(bench.prompt(32), 8))], 1)
    for _ in range(bench.rounds):
        for clients in speeds:
            jobs = [Job(make_query(bench.prompt(32), tokens)) for _ in range(clients)]
            seen, seconds = run_jobs(bench.url, jobs, clients)
            speeds[clients].append(tokens_in(seen) / seconds)
    ratio = statistics.median(many / one for one, many in zip(*speeds.values(), strict=True))
    details = {f"{clients} streams": f"{statistics.median(found):.1f} tokens/s" for clients, found in speeds.items()}
    return summarize("16 streams against 1", ratio, 3.0, details)


def measure_batching(bench: Bench) -> bool:
    """Lengths are log-uniform from 8 to 256: most answers are short, some are long. A static batch is what a loop over
    `generate` makes of the same requests: groups of 16, every row computed until the longest one is done. Both count
    only the tokens that were asked for."""
    count = STREAMS * (6 if bench.scale >= 1 else 2)
    lengths = [round(8 * 32 ** bench.generator.random()) for _ in range(count)]
    prompts = [bench.prompt(32) for _ in range(count)]
    jobs = [Job(make_query(prompt, length)) for prompt, length in zip(prompts, lengths, strict=True)]
    seen, in_flight = run_jobs(bench.url, jobs, STREAMS)
    static = 0.0
    for start in range(0, count, STREAMS):
        longest = max(lengths[start : start + STREAMS])
        group = [Job(make_query(prompt, longest)) for prompt in prompts[start : start + STREAMS]]
        static += run_jobs(bench.url, group, STREAMS)[1]
    speeds = {"in flight": tokens_in(seen) / in_flight, "static": tokens_in(seen) / static}
    details = {
        "answers": f"{count} of 8 to 256 tokens, {statistics.mean(lengths):.0f} on average",
        **{name: f"{speed:.1f} tokens/s" for name, speed in speeds.items()},
    }
    return summarize("in-flight against static batching", static / in_flight, 1.8, details)


def measure_prefix(bench: Bench) -> bool:
    ratios, times = [], {}
    for number in range(bench.rounds):
        means = {}
        for kind in ("shared", "not shared"):
            prefix = bench.prompt(512)
            salts = [f"{number}-{kind}-{i if kind == 'not shared' else 0}" for i in range(STREAMS + 1)]
            jobs = [Job(make_query([*prefix, *bench.prompt(8)], 4, cache_salt=salt)) for salt in salts]
            run_jobs(bench.url, jobs[:1], 1)  # the prefix was asked for before, as a system prompt is
            seen, _ = run_jobs(bench.url, jobs[1:], STREAMS)
            means[kind] = statistics.mean(one.time_to_first for one in seen)
        ratios.append(means["not shared"] / means["shared"])
        times = means
    details = {kind: f"mean time to first token {seconds * 1e3:.0f} ms" for kind, seconds in times.items()}
    return summarize("a shared prefix of 512 tokens at 16 requests", statistics.median(ratios), 3.0, details)


def measure_priority(bench: Bench) -> bool:
    """Arrivals are a Poisson process. The plain queue and classes (one in five is P0, the others P2) take turns on the
    same arrivals, at a rate that grows until the queue's P99 is three times what it is when requests hardly meet. A P99
    is that of all turns together: one turn has some twenty P0 requests only."""
    seconds, clients = 50 * bench.scale, 128

    def load(rate: float, seed: int, classes: Callable[[int], str]) -> dict[str, list[float]]:
        jobs = [
            Job(make_query(bench.prompt(48), 24, priority_class=classes(place)), due)
            for place, due in enumerate(arrivals(random.Random(seed), rate, seconds))
        ]
        found: dict[str, list[float]] = {}
        for one in run_jobs(bench.url, jobs, min(clients, len(jobs)))[0]:
            found.setdefault(str(one.job.query.parameters["priority_class"]), []).append(one.time_to_first)
        return found

    def take_turns(rate: float, *sides: Callable[[int], str]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {}
        for turn, classes in itertools.product(range(bench.rounds), sides):
            for name, found in load(rate, turn, classes).items():
                times.setdefault(name, []).extend(found)
        return times

    def plain(_: int) -> str:
        return "P1"

    def mixed(place: int) -> str:
        return "P2" if place % 5 else "P0"

    seen, spent = run_jobs(bench.url, [Job(make_query(bench.prompt(48), 24)) for _ in range(4 * STREAMS)], STREAMS)
    capacity = len(seen) / spent
    quiet = take_turns(0.2 * capacity, plain)["P1"]
    alone, queued, rate = percentile(quiet, 0.99), 0.0, 0.7 * capacity
    while queued < 3 * alone and rate < 1.5 * capacity:
        rate *= 1.15
        times = take_turns(rate, plain, mixed)
        queued, urgent, behind = (percentile(times[name], 0.99) for name in ("P1", "P0", "P2"))
    details = {
        "capacity": f"{capacity:.1f} requests/s",
        "plain queue alone": f"P99 {alone * 1e3:.0f} ms, of {len(quiet)} requests at 0.2 of it",
        "plain queue": f"P99 {queued * 1e3:.0f} ms, of {len(times['P1'])} requests at {rate / capacity:.2f} of it",
        "P0": f"P99 {urgent * 1e3:.0f} ms, of {len(times['P0'])} requests at the same load",
        "P2 beside it": f"P99 {behind * 1e3:.0f} ms",
    }
    return summarize("P0's P99 time to first token against a plain queue's", queued / urgent, 3.0, details)


def measure_overhead(bench: Bench) -> bool:
    """No bar. CPU: of a second server over the same package, whose network only sleeps. Time to first token: by turns
    over gRPC and from the executor in this process, over the same network."""
    from benchmarks.direct import executing, time_first

    tokens = max(16, round(96 * bench.scale))
    run_jobs(bench.url, [Job(make_query(bench.prompt(32), 8))], 1)
    with executing(bench.package) as executor:
        time_first(executor, bench.prompt(32))
        times: dict[str, list[float]] = {"over gRPC": [], "in the executor alone": []}
        for _ in range(20):
            seen, _ = run_jobs(bench.url, [Job(make_query(bench.prompt(32), 1))], 1)
            times["over gRPC"].append(seen[0].time_to_first)
            times["in the executor alone"].append(time_first(executor, bench.prompt(32)))
    print("overhead, 16 streams")
    for path, seconds in times.items():
        print(f"    time to first token {path}: {statistics.median(seconds) * 1e3:.1f} ms")
    with serving(bench.package, idle=STEP_S) as server:
        idle = replace(bench, server=server)
        text = Query(text="word " * 24, options={"max_tokens": tokens, "end_id": -1})
        for name, queries in (
            ("token ids", [make_query(bench.prompt(32), tokens) for _ in range(STREAMS)]),
            ("text", [text] * STREAMS),
        ):
            spent: dict[str, float] = {}
            run_jobs(idle.url, [Job(query) for query in queries], STREAMS)
            with counting(idle.usage, spent):
                run_jobs(idle.url, [Job(query) for query in queries], STREAMS)
            parts = {model: seconds / (STREAMS * tokens) * 1e6 for model, seconds in spent.items()}
            print(f"    CPU outside the network, {name}: {sum(parts.values()):.0f} us a token", end="")
            print(f" ({', '.join(f'{model} {part:.0f}' for model, part in parts.items() if part >= 1)})")
    return True


def measure_soak(bench: Bench, minutes: float) -> bool:
    from benchmarks.soak import soak

    prompts = [bench.prompt(bench.generator.randrange(1, 120)) for _ in range(24)]
    return soak(bench.url, bench.server, bench.usage, prompts=prompts, minutes=minutes)


PARTS: dict[str, Callable[[Bench], bool]] = {
    "streams": measure_streams,
    "batching": measure_batching,
    "prefix": measure_prefix,
    "priority": measure_priority,
    "overhead": measure_overhead,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} or soak; all but soak if none")
    parser.add_argument("--package", type=Path, default=Path("out/smollm2-int4/package"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the soak")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if unknown := set(parts) - {*PARTS, "soak"}:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}")
    held = []
    vocabulary = read_vocabulary(find_package(arguments.package).repository)
    began = time.monotonic()
    # Answers are held against each other in the soak, so it runs where the batch does not change them.
    groups = ((tuple(name for name in parts if name != "soak"), None), (("soak",) if "soak" in parts else (), "exact"))
    for names, mode in groups:
        if not names:
            continue
        with serving(arguments.package, mode=mode) as server:
            bench = Bench(server, arguments.package, 0.15 if arguments.quick else 1.0, random.Random(0), vocabulary)
            for name in names:
                held.append(measure_soak(bench, arguments.minutes) if name == "soak" else PARTS[name](bench))
    print(f"in {time.monotonic() - began:.0f} s")
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
