"""Why a checkpoint's figures are no numbers: the first weight that is none, or the layer where values overflow."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from pipeline.errors import CheckpointError
from pipeline.evaluation.network_findings import find_broken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.evaluation.measurement import Measure
    from pipeline.evaluation.subject import Subject

LAYER = re.compile(r"\.layers\.(\d+)\.")


def require_finite(subjects: Sequence[Subject], measures: Sequence[Measure]) -> None:
    """CheckpointError for the first checkpoint whose perplexity is not finite."""
    for subject, measure in zip(subjects, measures, strict=True):
        if not math.isfinite(measure.tally.perplexity):
            raise _explain(subject, find_broken(measure.layers.error))


def _explain(subject: Subject, layer: int | None) -> CheckpointError:
    """`layer`: the first whose output is not finite, None where that of all is. It is to blame, or what is in none."""
    import torch

    for name in subject.source.tensors:
        found = LAYER.search(name)
        if (int(found[1]) if found else None) not in (layer, None):
            continue
        values = subject.source.read(name).to_torch()
        if values.is_floating_point() and not bool((finite := torch.isfinite(values.float())).all()):
            index = (~finite).nonzero()[0].tolist()
            return CheckpointError(
                f"{subject.label}: {name} is {float(values[tuple(index)])} at {index}",
                hint="the weights are damaged; no model has such a value: copy or convert them again",
            )
    where = "its logits are" if layer is None else f"the output of layer {layer} is"
    return CheckpointError(
        f"{subject.label}: {where} not finite, and all weights there are",
        hint="its values are larger than their type holds: convert the checkpoint with another dtype",
    )
