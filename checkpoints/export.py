"""Writing a model as a hub folder: the hub's config.json, original tensor names, a few shards and an index."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from checkpoints.folder import write_json
from checkpoints.models import Recipe
from checkpoints.tokenizer import BOS, EOS, save_tokenizer


def execution_options(recipe: Recipe) -> dict[str, str]:
    """Return how the model is to be run here, as arguments of ``from_config`` and ``from_pretrained``.

    The experts run in a loop (``eager``): on a CPU that takes two thirds of the default's time, and training and
    check must add the experts in one order to agree to the last bit.
    """
    options = {"attn_implementation": "sdpa"}
    if "n_routed_experts" in recipe.config:
        options["experts_implementation"] = "eager"
    return options


def build_model(recipe: Recipe) -> PreTrainedModel:
    """Return the recipe's model in fp32 with seeded random weights."""
    torch.manual_seed(recipe.seed)
    # A deep copy: transformers writes its own keys into the rope_scaling that it is given.
    values = copy.deepcopy(dict(recipe.config))
    config = AutoConfig.for_model(str(values.pop("model_type")), **values)
    config.dtype = torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **execution_options(recipe))
    return model


def save_model(model: PreTrainedModel, recipe: Recipe, folder: Path) -> None:
    """Write bf16 shards with their index, config.json and generation_config.json into an existing folder.

    ``transformers`` splits its fused experts back into the hub's one tensor per expert and projection. Its own
    config.json is replaced by the recipe's, which holds keys it would rename or drop.
    """
    # The router is bf16 on the hub too; transformers widens it again on reading, which is exact.
    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state, max_shard_size=recipe.shard_bytes)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)
    write_json(folder / "config.json", dict(recipe.config))
    generation = {
        "_from_model_config": True,
        "bos_token_id": recipe.config["bos_token_id"],
        "eos_token_id": recipe.config["eos_token_id"],
        "transformers_version": recipe.config["transformers_version"],
    }
    write_json(folder / "generation_config.json", generation)


def save_vocabulary(tokenizer: Tokenizer, recipe: Recipe, folder: Path) -> None:
    """Write the tokenizer files, after checking that they fit the model. Raises ValueError when they do not."""
    if tokenizer.get_vocab_size() != recipe.vocab_size:
        raise ValueError(f"{recipe.name}: {tokenizer.get_vocab_size()} tokens for a vocabulary of {recipe.vocab_size}")
    ids = (tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS))
    if ids != (recipe.config["bos_token_id"], recipe.config["eos_token_id"]):
        raise ValueError(f"{recipe.name}: the tokenizer's begin and end are {ids}, not those of config.json")
    save_tokenizer(tokenizer, folder, recipe.context)
