"""A byte-level BPE in DeepSeek's form: its special tokens, its pre-tokenizer's shape, its chat template."""

# ruff: noqa: RUF001 (DeepSeek spells its special tokens with full-width bars)

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
# In the order of their ids. As on the hub, the role and fill-in-the-middle tokens are ordinary added tokens.
SPECIAL_TOKENS = (
    BOS,
    EOS,
    PAD,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁end｜>",
)

# deepseek-ai/DeepSeek-V2's tokenizer splits by a sequence of patterns, digits one by one; here with Unicode classes.
PATTERNS = (r"[\r\n]+", r"\s?\p{L}+", r"\s?[\p{P}\p{S}]+", r"\s+$")

CHAT_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on ``texts``; ids 0 to 7 are SPECIAL_TOKENS, and encoding puts BOS first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS}:0 $A:0",
        pair=f"{BOS}:0 $A:0 {BOS}:1 $B:1",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Write tokenizer.json and a hub-style tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))

    def describe(token: str) -> dict[str, object]:
        flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        return {"__type": "AddedToken", "content": token, **flags}

    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": describe(BOS),
        "clean_up_tokenization_spaces": False,
        "eos_token": describe(EOS),
        "legacy": True,
        "model_max_length": model_max_length,
        "pad_token": describe(PAD),
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
