"""INT4 methods on real weights, and against nvidia-modelopt (AWQ) and llm-compressor (GPTQ) on the same samples.

    python -m benchmarks.quantization quality [METHOD…]   SmolLM2-135M: loss in nats per token over the original
    python -m benchmarks.quantization awq [MODEL…]        against modelopt's INT4_AWQ_CFG: time, peak memory, perplexity
    python -m benchmarks.quantization gptq [MODEL…]       against llm-compressor's GPTQ: the same
    python -m benchmarks.quantization memory [4 12]       peak memory by size in GB; --methods: of some methods only
    python -m benchmarks.quantization                     everything; exit status 1 where a bar is missed

--samples calibrates on that many instead of 128 (llama-250m: 32), --tokens scores that many: a part then takes minutes.

Models: smollm2 (`make smollm2` first), llama-250m (random weights), v2-tiny. Losses are measured by the interpreter in
exact mode on what each side wrote, read back (with zero points: the AWQ export, in 16 bits), on held-out text of the
calibration's domain (Python's documentation) and of another (Perl's, from Debian's package perl-doc). Each side
quantizes in a process of its own, one after the other; peers live under out/peers, made when missing. "Faster" is
judged in processor seconds, which other load disturbs less.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import synthetic
from benchmarks.bars import hold_best, hold_flat
from benchmarks.quantization_models import FOLDER, MODELS, Model, other_domain
from benchmarks.quantization_sides import convert, export_awq, quantize, quantize_by_peer
from pipeline.progress import format_amount
from pipeline.quantization.catalog import WITH_ZEROS

METHODS = ("rtn", "rtn_clip", "awq", "gptq", "awq_gptq")
EXPORTED = tuple(WITH_ZEROS.values())  # by none of our engines: measured on what AWQ's format has of them
# Share of rounding to nearest's loss in its format that the best of some methods may have, in either domain.
BARS = {"awq": (0.6, ("awq",)), "awq_zeros": (0.6, ("awq_zeros",)), "gptq": (0.9, ("gptq",)), "best": (0.45, METHODS)}
FASTER, SMALLER = 3.0, 0.5
SAME = 1e-3  # of perplexity: below this two methods are alike
INT4_SHARE = 0.28


def measure(model: Model, outputs: Sequence[Path]) -> dict[str, list[float]]:
    """Nats per token by domain: the original's, then each output's over it."""
    from pipeline.checkpoint.text import encode_file
    from pipeline.evaluation.measurement import measure as run_all
    from pipeline.evaluation.subject import open_subject
    from pipeline.evaluation.windows import cut_windows
    from pipeline.progress import SILENT

    subjects = [open_subject(path) for path in (convert(model), *outputs)]
    found = {}
    for domain, file in {"python": model.heldout, "perl": other_domain()}.items():
        tokens = encode_file(subjects[0].tokenizer, file, setting="heldout")
        windows = cut_windows(tokens, total=model.tokens, window=256, origin=str(file), first=subjects[0].begin)
        losses = [math.log(each.tally.perplexity) for each in run_all(subjects, windows, SILENT, by_layer=False)]
        found[domain] = [losses[0], *(loss - losses[0] for loss in losses[1:])]
    return found


def compare_methods(methods: Sequence[str]) -> bool:
    """Every method's loss as a share of rounding to nearest's in its format, and the GPTQ peer's."""
    model = MODELS["smollm2"]
    wanted = list(methods or (*METHODS, *EXPORTED))
    # What a share is of goes first.
    nearest = ["rtn", *(["rtn_zeros"] if "awq_zeros" in wanted else [])]
    runs = {name: quantize(model, name) for name in dict.fromkeys([*nearest, *wanted])}
    for name in runs.keys() & EXPORTED:
        runs[name] = dataclasses.replace(runs[name], output=export_awq(runs[name].output))
    if "gptq" in runs:
        runs["llm-compressor"] = quantize_by_peer(model, "llmcompressor")
    losses = measure(model, [run.output for run in runs.values()])
    passed = True
    for domain, (original, *over) in losses.items():
        print(f"{domain}: original {original:.4f} nats per token")
        lost = dict(zip(runs, over, strict=True))
        shares = {name: loss / lost["rtn_zeros" if name in EXPORTED else "rtn"] for name, loss in lost.items()}
        for name, run in runs.items():
            print(f"  {name:15} +{lost[name]:.4f}  {shares[name]:.2f} of rounding to nearest's; {run}", flush=True)
        passed &= hold_bars(shares)
    return passed


def hold_bars(shares: Mapping[str, float]) -> bool:
    """Prints every bar of a domain, and whether the measured methods' shares miss none."""
    held = [hold_best(what, bar, shares, names) for what, (bar, names) in BARS.items()]
    if "llm-compressor" in shares:
        held.append(hold_best("gptq", shares["llm-compressor"], shares, ("gptq",)))
    return all(held)


def compare_awq(names: Sequence[str]) -> bool:
    return sum(not _compare(MODELS[name], "awq", "modelopt") for name in names or MODELS) == 0


def compare_gptq(names: Sequence[str]) -> bool:
    return sum(not _compare(MODELS[name], "gptq", "llmcompressor") for name in names or MODELS) == 0


def _compare(model: Model, method: str, peer: str) -> bool:
    ours, theirs = quantize(model, method), quantize_by_peer(model, peer)
    print(f"{model.name}, {model.samples} x {model.length} tokens, groups of {model.group}")
    print(f"  {method:14} {ours}\n  {peer:14} {theirs}")
    faster, smaller = theirs.processor / ours.processor, ours.peak / theirs.peak
    print(f"  {theirs.seconds / ours.seconds:.1f} times as fast ({faster:.1f} in processor time), {smaller:.2f} of the "
          "memory")  # fmt: skip
    passed = method != "awq" or (faster >= FASTER and smaller <= SMALLER)
    for domain, (original, mine, other) in measure(model, [ours.output, theirs.output]).items():
        print(f"  {domain}: original {original:.4f} nats per token, {method} {mine:+.4f}, {peer} {other:+.4f}",
              flush=True)  # fmt: skip
        passed &= mine <= other + SAME
    return passed


def measure_memory(sizes: Sequence[str], methods: Sequence[str] = METHODS) -> bool:
    """Random routed checkpoints of several sizes: the peak must not follow the size."""
    peaks: dict[str, list[int]] = {method: [] for method in methods}
    passed, folder = True, FOLDER / "memory"
    for gigabytes in map(float, sizes or ("4", "12")):
        shutil.rmtree(folder, ignore_errors=True)
        nbytes = synthetic.random_moe(folder / "source", gigabytes)
        model = dataclasses.replace(
            MODELS["v2-tiny"], name="memory/run", prepare=lambda: folder / "source", dtype=None, group=128, samples=8
        )
        write_tokenizer(folder / "source")
        for method in methods:
            run = quantize(model, method)
            peaks[method].append(run.peak)
            share = int4_share(run.output)
            passed &= share <= INT4_SHARE
            print(f"{method:9} {format_amount(nbytes, 'B'):>8} of bfloat16: {run}; quantized linears are "
                  f"{share:.3f} of their fp16", flush=True)  # fmt: skip
            shutil.rmtree(run.output)
        shutil.rmtree(folder)
    return hold_flat(peaks) and passed


def write_tokenizer(folder: Path) -> None:
    shutil.copyfile(MODELS["v2-tiny"].prepare() / "tokenizer.json", folder / "tokenizer.json")


def int4_share(output: Path) -> float:
    """Bytes of the quantized linears, scales included, over those in 16 bits."""
    from pipeline.checkpoint.folder import CheckpointFolder

    folder = CheckpointFolder.open(output)
    stored = whole = 0
    for name in folder.config["trtseek"]["quantization"]["quantized"]:
        packed, scales = folder.tensors[f"{name}.weight"], folder.tensors[f"{name}.weights_scaling_factor"]
        stored += packed.nbytes + scales.nbytes
        whole += packed.nbytes * 4
    return stored / whole


COMMANDS: dict[str, Callable[[Sequence[str]], bool]] = {
    "quality": compare_methods,
    "awq": compare_awq,
    "gptq": compare_gptq,
    "memory": measure_memory,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS, nargs="?")
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options: Any = parser.parse_args()
    wishes = {"samples": options.samples, "tokens": options.tokens}
    for name, model in MODELS.items():
        MODELS[name] = dataclasses.replace(model, **{key: value for key, value in wishes.items() if value})
    began, load = time.monotonic(), Path("/proc/loadavg").read_text().split()[0]
    COMMANDS["memory"] = partial(measure_memory, methods=options.methods)
    wanted = {options.command: options.arguments} if options.command else dict.fromkeys(COMMANDS, ())
    passed = {name: COMMANDS[name](arguments) for name, arguments in wanted.items()}
    for name, met in passed.items():
        print(f"{name}: {'no bar' if met else 'bars'} missed")
    print(f"{time.monotonic() - began:.0f} s in all, begun at load {load}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
