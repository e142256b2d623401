"""The `transformers` modules that everything is proved against and calibrated through, one decoder layer at a time.

Built on the meta device and given their weights by assignment, so that a layer costs its own weights and no more.
Attention is eager (the form whose arithmetic is written out), experts run in a loop (on a CPU two thirds of the time
of the grouped form). Weights come under their on-disk names, as `pipeline.checkpoint.hub_weights.hf_layer_state` gives
them.

Shapes: B batch, T tokens, H hidden, E routed experts, I their width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.layer_state import EXPERTS, STACKS, ExpertStack
from pipeline.checkpoint.lean_import import import_lean
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# HF class -> (transformers package, prefix of its classes)
MODULES = {
    "LlamaForCausalLM": ("llama", "Llama"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    # transformers has no class of this name, but one of the same function: the decoder of DeepSeek-OCR 2. Its attention
    # is Llama's (rotated by halves); its router takes the top k of a float32 softmax and, unless told to, neither
    # normalizes nor scales nor groups; routed experts and one wide MLP of shared experts are added. That is, name by
    # name, the modeling_deepseek.py of deepseek-moe-16b. It wants the kind of each layer spelled out.
    "DeepseekForCausalLM": ("deepseek_ocr2", "DeepseekOcr2Text"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "DeepseekV2"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "DeepseekV3"),
}
ROUTER = "mlp.gate."
# Routed experts of a layer up to this many bytes are held: V2-Lite's 2.2 GB in float32, but not V2's 15, V3's 45 GB.
HELD_EXPERTS = 3_000_000_000
# Keys that would make transformers load custom code, refuse our dtype, or look for a quantizer.
OWN_KEYS = ("auto_map", "torch_dtype", "dtype", "quantization_config", "trtseek")


def build_hf_layer(
    config: Mapping[str, Any], layer: int, state: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.nn.Module:
    """The decoder layer `layer` of the model that `config` (a parsed config.json) describes, in eval mode on the CPU.

    `state` maps names relative to the layer ("self_attn.q_proj.weight", "mlp.experts.3.up_proj.weight") to weights,
    which are cast to `dtype`; the router alone is float32 (its correction bias too), as `transformers` keeps it. The
    module's weights share memory with `state` where no cast is needed. Routed experts that would take more than
    HELD_EXPERTS bytes are no parameters of it: each is read from `state` whenever its tokens come. Call it as
    `module(hidden [B,T,H], attention_mask=causal_mask(T), position_embeddings=rotary(hidden, position_ids))`.
    Raises CheckpointError for missing, left-over or misshapen weights.
    """
    import torch

    module_source, hf_config, prefix = _load_classes(config)
    with torch.device("meta"):
        module = cast("torch.nn.Module", getattr(module_source, f"{prefix}DecoderLayer")(hf_config, layer))
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    stacks = _stack_experts(state, wanted, dtype)
    used = {name for stack in stacks.values() for expert in range(stack.shape[0]) for name in stack.names(expert)}
    weights = {name: state[name] for name in state if name not in used}
    nbytes = sum(math.prod(stack.shape) for stack in stacks.values()) * dtype.itemsize
    if nbytes <= HELD_EXPERTS:
        weights |= {name: stack.stacked() for name, stack in stacks.items()}
    else:
        _read_when_used(module, stacks)
        wanted = {name: shape for name, shape in wanted.items() if name not in stacks}
    cast_to = {name: torch.float32 if name.startswith(ROUTER) else dtype for name in weights}
    _check_shapes(layer, wanted, weights)
    module.load_state_dict({name: w.to(cast_to[name]) for name, w in weights.items()}, assign=True)
    return module.eval().requires_grad_(False)


def build_hf_rotary(config: Mapping[str, Any]) -> torch.nn.Module:
    """The rotary embedding: `rotary(hidden [B,T,H], position_ids [B,T])` gives a layer's position_embeddings.

    That is (cos, sin) of hidden's type for Llama, one complex tensor for DeepSeek-V2. `dynamic` scaling keeps state:
    its frequencies grow with the largest position seen, so use a fresh module for every independent sequence.
    """
    module_source, hf_config, prefix = _load_classes(config)
    module = cast("torch.nn.Module", getattr(module_source, f"{prefix}RotaryEmbedding")(hf_config))
    return module.eval()


def build_hf_norm(config: Mapping[str, Any], weight: torch.Tensor) -> torch.nn.Module:
    """The final norm (model.norm), with `weight` [H] in the type it comes in."""
    import torch

    module_source, hf_config, prefix = _load_classes(config)
    with torch.device("meta"):
        norm_class = getattr(module_source, f"{prefix}RMSNorm")
        module = cast("torch.nn.Module", norm_class(hf_config.hidden_size, eps=hf_config.rms_norm_eps))
    module.load_state_dict({"weight": weight}, assign=True)
    return module.eval().requires_grad_(False)


def causal_mask(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask [1, 1, T, T] of one sequence from position 0; eager layers attend to everything without it."""
    import torch

    return torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]


def _read_when_used(module: torch.nn.Module, stacks: Mapping[str, ExpertStack]) -> None:
    """Puts `stacks` in the place of the module's parameters: its own code only indexes them."""
    for name, stack in stacks.items():
        owner, _, attribute = name.rpartition(".")
        delattr(module.get_submodule(owner), attribute)
        setattr(module.get_submodule(owner), attribute, stack)


def _load_classes(config: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """The transformers module of the architecture, its config object, and the prefix of its class names."""
    names = config.get("architectures") or [None]
    if names[0] not in MODULES:
        raise CheckpointError(
            f"architecture {names[0]} has no transformers reference here", hint=f"known: {', '.join(MODULES)}"
        )
    package, prefix = MODULES[names[0]]
    module_source = import_lean(f"transformers.models.{package}.modeling_{package}")
    config_source = import_lean(f"transformers.models.{package}.configuration_{package}")
    # transformers writes into the rope mapping that it is given.
    values = {key: copy.deepcopy(value) for key, value in config.items() if key not in OWN_KEYS}
    _reject_unproven(names[0], values)
    if "n_routed_experts" in values and values["n_routed_experts"] is None:  # dense layers only
        values |= {"n_routed_experts": 1, "first_k_dense_replace": values["num_hidden_layers"]}
    if "kv_lora_rank" in values:  # every query head has its own key: transformers would repeat them once more
        values["num_key_value_heads"] = values["num_attention_heads"]
    if package == "deepseek_ocr2":
        architecture = parse_architecture(config)
        layers = range(architecture.num_layers)
        values["mlp_layer_types"] = ["sparse" if architecture.is_routed(layer) else "dense" for layer in layers]
    hf_config = getattr(config_source, f"{prefix}Config")(**values)
    hf_config._attn_implementation = "eager"
    hf_config._experts_implementation = "eager"
    return module_source, hf_config, prefix


# HF class -> settings that DeepSeek's own code honours and transformers 5 ignores: only this value can be proved.
IGNORED: dict[str, dict[str, object]] = {
    "DeepseekForCausalLM": {"norm_topk_prob": False},
    "DeepseekV2ForCausalLM": {"norm_topk_prob": False, "moe_layer_freq": 1},
    "DeepseekV3ForCausalLM": {"moe_layer_freq": 1},
}


def _reject_unproven(name: str, values: Mapping[str, Any]) -> None:
    """Against what ignores a setting, a network that honours it would prove nothing."""
    for key, neutral in IGNORED.get(name, {}).items():
        if values.get(key) not in (None, neutral):
            raise CheckpointError(
                f"config.json sets {key} to {values[key]!r}, which transformers ignores for this class",
                hint="no published model of this class sets it; without a reference the model cannot be proved",
            )


def _stack_experts(
    state: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, ExpertStack]:
    """The module's stacked parameters by name; none where the layer has no routed experts."""
    places = {f"{EXPERTS}.{stack}": stack for stack in STACKS}
    return {name: ExpertStack(state, stack, wanted[name], dtype) for name, stack in places.items() if name in wanted}


def _check_shapes(layer: int, wanted: Mapping[str, tuple[int, ...]], weights: Mapping[str, torch.Tensor]) -> None:
    found = {name: tuple(w.shape) for name, w in weights.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"layer {layer}: {name} has shape {found.get(name)}, transformers' module wants {wanted.get(name)}",
            hint=f"{len(wrong)} weights differ between the checkpoint's layout and transformers' module",
        )
