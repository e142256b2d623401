"""What config.json says of an engine checkpoint that another tool has quantized: the same as after our own stage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.engine_config import QUANTIZATION_KEY
from pipeline.checkpoint.json_text import remove_key, set_keys
from pipeline.checkpoint.layouts.scales import BLOCK, CONFIG_KEY
from pipeline.checkpoint.own_key import OWN_KEY
from pipeline.checkpoint.strict_json import read_json

if TYPE_CHECKING:
    from pipeline.checkpoint.foreign.folder import ForeignFolder


def write_held(source: ForeignFolder, config: Path) -> None:
    """Changes `config`, as it was written for weights that are not quantized."""
    from pipeline.quantization.catalog import name_algo

    own = read_json(config)[OWN_KEY]
    groups = sorted({held.group for held in source.held.values() if held.group is not None})
    formats = {held.format for held in source.held.values()}
    if formats:
        own["quantization"] = {
            "quant_algo": name_algo(formats),
            "method": source.method,
            "group_size": groups[-1] if groups else None,
            "has_zero_point": False,
            "pre_quant_scale": any(held.prescaled for held in source.held.values()),
            "kv_cache_quant_algo": "FP8" if source.caches else None,
            "quantized": {
                name.removesuffix(".weight"): {"format": held.format, "group_size": held.group}
                for name, held in source.held.items()
            },
        }
    if "fp8_blocks" in formats:
        own[CONFIG_KEY] = [BLOCK, BLOCK]
    text = remove_key(config.read_text(encoding="utf-8"), QUANTIZATION_KEY)
    config.write_text(set_keys(text, {OWN_KEY: own}), encoding="utf-8")
