"""Make the shipped checkpoints from nothing but apt and the Python environment.

    python -m checkpoints.train [--model deepseek-v2-tiny] [--minutes 30]

The budget is wall-clock time, so a run on another machine takes more or fewer steps: the seeds fix the data's
order and the first weights, not the last bytes. A folder is replaced only when its training has ended.

On a machine with other work, OMP_NUM_THREADS=1 was five times as fast as two threads, which wait for each other.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoints.balance import balance_loss
from checkpoints.card import Run, write_card
from checkpoints.corpus import ROOT, Corpus, CorpusError, load_corpus, write_texts
from checkpoints.export import build_model, execution_options, save_model, save_vocabulary
from checkpoints.folder import replace_folder
from checkpoints.models import RECIPES, Recipe
from checkpoints.perplexity import WINDOW, Score, cut_windows, measure_loss, measure_unigram, shift_in
from checkpoints.tokenizer import EOS, train_tokenizer

WARM_UP = 0.03  # of the budget
FINAL_RATE = 0.05  # of the peak learning rate
REPORT_SECONDS = 20.0


@dataclass(kw_only=True)
class Clock:
    """The wall-clock budget, started at the first reading."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def share(self) -> float:
        """The part of the budget that is used, at most 1."""
        return min(1.0, self.elapsed / self.seconds)


def scale_rate(share: float) -> float:
    """Return the learning rate as a part of its peak: linear warm-up, then a cosine down to FINAL_RATE."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.01)
    cosine = 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))
    return FINAL_RATE + (1 - FINAL_RATE) * cosine


def encode_documents(tokenizer: Tokenizer, documents: Mapping[str, str]) -> Tensor:
    """Return all documents as one ``[N]`` stream of ids, an end token after each and no begin tokens."""
    eos = tokenizer.token_to_id(EOS)
    encodings = tokenizer.encode_batch(list(documents.values()), add_special_tokens=False)
    return torch.tensor([token for encoding in encodings for token in (*encoding.ids, eos)])


def draw_batches(stream: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield ``[batch, WINDOW]`` windows: every epoch cuts the stream at another offset and shuffles the pieces."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(WINDOW, (1,), generator=generator))
        windows = cut_windows(stream[offset:])
        order = torch.randperm(len(windows), generator=generator)
        for rows in torch.split(order, batch):
            if len(rows) == batch:
                yield windows[rows]


def group_parameters(model: PreTrainedModel) -> list[dict[str, object]]:
    """Weight decay for matrices, none for the norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def fit_model(model: PreTrainedModel, recipe: Recipe, stream: Tensor, heldout: Tensor, clock: Clock) -> int:
    """Train in place until the budget is used; return the number of steps."""
    optimizer = torch.optim.AdamW(group_parameters(model), betas=(0.9, 0.95), fused=True)
    reported, step = 0.0, 0
    for step, windows in enumerate(draw_batches(stream, recipe.batch, recipe.seed)):
        if clock.share >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * scale_rate(clock.share)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(
                input_ids=shift_in(windows, recipe.bos),
                use_cache=False,
                output_router_logits=recipe.balance > 0,
            )
        loss = functional.cross_entropy(output.logits.float().flatten(0, 1), windows.flatten())
        total = loss + recipe.balance * balance_loss(output.router_logits, recipe) if recipe.balance else loss
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if clock.elapsed - reported > REPORT_SECONDS:
            reported = clock.elapsed
            rate = (step + 1) * windows.numel() / reported
            left = max(0.0, clock.seconds - reported) / 60
            check = measure_loss(model, heldout[:: max(1, len(heldout) // 16)], recipe.bos)
            print(
                f"{recipe.name}: step {step + 1}, loss {loss.item():.3f}, total {total.item():.3f}, "
                f"held-out {check:.3f}, {rate:.0f} tokens/s, {left:.1f} min left",
                flush=True,
            )
    return step


def round_weights(model: PreTrainedModel) -> None:
    """Round every parameter to bf16 in place, and leave the buffers: RoPE's frequencies are not stored."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def check_saved(model: PreTrainedModel, recipe: Recipe, folder: Path, windows: Tensor) -> PreTrainedModel:
    """Read ``folder`` back in fp32 and compare it with ``model``, whose weights are already rounded to bf16.

    Raises ValueError unless the logits are equal bit for bit.
    """
    saved: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **execution_options(recipe)
    )
    with torch.inference_mode():
        if not torch.equal(saved(input_ids=windows).logits, model(input_ids=windows).logits):
            raise ValueError(f"{folder}: the saved checkpoint does not compute what the trained model does")
    return saved


def make_checkpoint(recipe: Recipe, corpus: Corpus, minutes: float, folder: Path) -> Run:
    """Train ``recipe`` and put the finished hub folder in place; return what was measured."""
    tokenizer = train_tokenizer(corpus.training.values(), recipe.vocab_size)
    stream = encode_documents(tokenizer, corpus.training)
    heldout = cut_windows(encode_documents(tokenizer, corpus.heldout))
    size = len(tokenizer.decode(heldout.flatten().tolist(), skip_special_tokens=True).encode())
    print(f"{recipe.name}: {len(stream):,} tokens to train on, {heldout.numel():,} held out", flush=True)

    model = build_model(recipe).train()
    clock = Clock(seconds=minutes * 60)
    steps = fit_model(model, recipe, stream, heldout, clock)
    seconds = clock.elapsed
    round_weights(model.eval())
    with replace_folder(folder) as fresh:
        save_model(model, recipe, fresh)
        save_vocabulary(tokenizer, recipe, fresh)
        saved = check_saved(model, recipe, fresh, heldout[:4])
        run = Run(
            steps=steps,
            seconds=seconds,
            threads=torch.get_num_threads(),
            training_tokens=steps * recipe.batch * WINDOW,
            corpus_tokens=len(stream),
            score=Score(loss=measure_loss(saved, heldout, recipe.bos), tokens=heldout.numel(), size=size),
            unigram=Score(loss=measure_unigram(stream, heldout, recipe.vocab_size), tokens=heldout.numel(), size=size),
        )
        write_card(recipe, corpus, run, model.num_parameters(), fresh)
    return run


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m checkpoints.train", description="Make the shipped checkpoints.")
    parser.add_argument("--model", choices=sorted(RECIPES), action="append", help="one of them (default: all)")
    parser.add_argument("--minutes", type=float, default=30.0, help="training time for each (default: 30)")
    parser.add_argument("--output", type=Path, default=ROOT, help="where the folders go (default: checkpoints/)")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error("--minutes must be above 0")
    torch.set_num_threads(min(torch.get_num_threads(), 8))  # such small matrices gain nothing from more
    try:
        corpus = load_corpus()
        write_texts(corpus, options.output / "text")
    except CorpusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name in options.model or RECIPES:
        run = make_checkpoint(RECIPES[name], corpus, options.minutes, options.output / name)
        print(
            f"{name}: held-out perplexity {run.score.perplexity:.1f} after {run.seconds / 60:.1f} min",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
