"""How far roundings may take a network's logits, from the types that it declares."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.network.spec import NetworkSpec

# Unit roundoff of the declared type.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
# Roundings of one value on its way through a decoder layer, counted in the network: norm, its weight, q/k/v, RoPE,
# cache, scale, attention, output projection, residual; norm, its weight, two projections, SiLU, product, down
# projection, residual; in a routed layer also the experts' weighted sum.
ROUNDINGS_PER_LAYER = 18
# Of FP8 E4M3, and of INT8 for values of a sixteenth of the largest: its half step is 1/254 of that.
CACHE_ROUNDOFF, CACHE_ROUNDINGS_PER_LAYER = 2.0**-4, 2
PAYLOAD_ROUNDOFF = 2.0**-4  # of FP8 E4M3, with a scale for each row


def derive_declared_bound(architecture: Architecture, spec: NetworkSpec) -> float:
    """Bound on `declared_error`: with R independent roundings of unit roundoff u on the way, errors add as u·sqrt(R)
    (Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019). Products sum in fp32: that counts only where it is the type."""
    roundings = ROUNDINGS_PER_LAYER * architecture.num_layers + 2
    if spec.dtype == "float32":
        roundings *= architecture.hidden_size
    return UNIT_ROUNDOFF[spec.dtype] * math.sqrt(roundings)


def derive_payload_bound(architecture: Architecture) -> float:
    """Bound on the error by what rows are sent to experts as, as there: in each routed layer a row is rounded once."""
    return PAYLOAD_ROUNDOFF * math.sqrt(sum(map(architecture.is_routed, range(architecture.num_layers))))


def derive_cache_bound(architecture: Architecture) -> float:
    """Bound on the error by a quantized cache, as there: each key and value, or all of a latent row, is rounded
    once."""
    return CACHE_ROUNDOFF * math.sqrt(CACHE_ROUNDINGS_PER_LAYER * architecture.num_layers)
