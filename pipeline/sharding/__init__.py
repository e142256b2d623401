"""One model over several ranks: who they are, what each holds, and its slices of the engine checkpoint.

Light and without torch: asked by the config's checks, by the network of a rank, and by whoever writes rank checkpoints.
"""

from pipeline.sharding.divisions import check_division, divisions, find_undivided, working_sizes
from pipeline.sharding.ranks import Parallel, Rank, experts, layers
from pipeline.sharding.sizes import Sizes, local_sizes
from pipeline.sharding.slices import SlicedSource, slice_source

__all__ = [
    "Parallel",
    "Rank",
    "Sizes",
    "SlicedSource",
    "check_division",
    "divisions",
    "experts",
    "find_undivided",
    "layers",
    "local_sizes",
    "slice_source",
    "working_sizes",
]
