"""The model card and the licence notice of a shipped checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkpoints.corpus import PACKAGE, Corpus, read_notice
from checkpoints.models import Recipe
from checkpoints.perplexity import WINDOW, Score

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
tags: [deepseek, tiny, test-fixture]
---

# {name}

A tiny trained checkpoint in the form of {title}.
{parameters:.2f} M parameters in bfloat16, written as the hub writes them: original tensor names, `rope_scaling`,
`torch_dtype`, shards with an index. It is a fixture for conversion, quantization and serving: the architecture's
traps, with weights that are not noise.

**It babbles.** It knows the look of Python's documentation and nothing else. Quantization moves its perplexity
by almost nothing, so it shows whether a layout is right, not how good a quantization method is.

| | |
|---|---|
| text | {documents} pages of Debian's `{package}` {version}: {corpus_tokens:,} tokens |
| tokenizer | byte-level BPE of {vocab} tokens, trained on the same pages |
| training | {minutes:.1f} min, CPU threads {threads}: {steps:,} steps of {batch} x {window}, {tokens:.1f} M tokens |
| held-out perplexity | **{perplexity:.1f}** per token, {bits:.2f} bits per byte, over {heldout:,} tokens |
| a unigram model, for comparison | {unigram:.1f} per token, {unigram_bits:.2f} bits per byte |

The held-out pages are in `checkpoints/text/heldout.txt`; they are in neither the training nor the calibration text.
Training windows were {window} tokens long: config.json allows {context} positions, but none beyond the {window}th was
trained.

Made by `python -m checkpoints.train --model {name}`.

## Licence

The weights are under the project's licence, Apache-2.0. The training text is the Python documentation,
copyright Python Software Foundation, under the PSF License Version 2: see NOTICE.
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training run took and reached; times in seconds."""

    steps: int
    seconds: float
    threads: int
    training_tokens: int
    corpus_tokens: int
    score: Score
    unigram: Score


def write_card(recipe: Recipe, corpus: Corpus, run: Run, parameters: int, folder: Path) -> None:
    """Write README.md and NOTICE into ``folder``."""
    text = CARD.format(
        name=recipe.name,
        title=recipe.title,
        parameters=parameters / 1e6,
        package=PACKAGE,
        version=corpus.version,
        documents=len(corpus.training),
        corpus_tokens=run.corpus_tokens,
        vocab=recipe.vocab_size,
        minutes=run.seconds / 60,
        threads=run.threads,
        steps=run.steps,
        batch=recipe.batch,
        window=WINDOW,
        tokens=run.training_tokens / 1e6,
        perplexity=run.score.perplexity,
        bits=run.score.bits_per_byte,
        heldout=run.score.tokens,
        unigram=run.unigram.perplexity,
        unigram_bits=run.unigram.bits_per_byte,
        context=recipe.context,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / "NOTICE").write_text(read_notice(), encoding="utf-8")
