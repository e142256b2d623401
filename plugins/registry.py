"""The operations by name: the one place where a plugin is made known."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    from plugins.operation import Operation

# Operation.NAME -> "module:class".
OPERATIONS = {
    "rope_paged_kv": "plugins.rope_paged_kv.operation:RopePagedKv",
    "rope_paged_latent": "plugins.rope_paged_kv.operation:RopePagedLatent",
    "paged_attention": "plugins.paged_attention.operation:PagedAttention",
    "paged_latent_attention": "plugins.paged_attention.operation:PagedLatentAttention",
    "moe_dispatch": "plugins.moe_all_to_all.operation:MoeDispatch",
    "moe_combine": "plugins.moe_all_to_all.operation:MoeCombine",
    "moe_experts": "plugins.moe_experts.operation:MoeExperts",
}


@cache
def find_class(name: str) -> type[Operation]:
    """The operation of that name. Raises CompatibilityError where there is none."""
    if name not in OPERATIONS:
        raise CompatibilityError(
            f"there is no plugin {name!r}", hint=f"known: {', '.join(OPERATIONS)}; plugins/registry.py lists them"
        )
    module, _, cls = OPERATIONS[name].partition(":")
    found: type[Operation] = getattr(importlib.import_module(module), cls)
    return found


def make_operation(name: str, attributes: Mapping[str, Any]) -> Operation:
    """Raises CompatibilityError for attributes that are not this operation's."""
    try:
        return find_class(name)(**attributes)
    except TypeError as error:
        raise CompatibilityError(
            f"plugin {name}: {error}", hint="it was written by another version of trtseek"
        ) from None


def read_operation(name: str, text: str) -> Operation:
    """The inverse of `Operation.to_json`. Raises CompatibilityError for another version of the contract."""
    values = json.loads(text)
    version = values.pop("version", None)
    if version != find_class(name).VERSION:
        raise CompatibilityError(
            f"plugin {name} is of version {version}, not {find_class(name).VERSION}", hint="build the engine again"
        )
    return make_operation(name, values)


def updated_inputs(kind: str, attributes: Mapping[str, Any]) -> tuple[int, ...]:
    """Which inputs a node of this kind writes to, if it is a plugin's; none for TensorRT's own layers."""
    return make_operation(kind, attributes).updates() if kind in OPERATIONS else ()
