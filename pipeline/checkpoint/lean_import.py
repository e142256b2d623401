"""Importing a model's module of transformers without what only its import wants: torch's compiler, its distributed
tensors, and sympy behind both. They are 75 MB of resident memory (of Triton, where that is installed, another 70) and
half of the processor seconds, for decorators and branches that no decoder layer on a CPU comes to.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

COMPILER = "torch._dynamo"
MASKS = f"{COMPILER}._trace_wrapped_higher_order_op"


def import_lean(name: str) -> ModuleType:
    """The module `name`. transformers holds from then on that this torch is one without distributed tensors, which
    there are; what is decorated for the compiler stays as it is, and the compiler itself can be imported as ever."""
    _deny_distributed()
    stand_ins = {} if COMPILER in sys.modules else {COMPILER: _compiler(), MASKS: _masks()}
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module(name)
    finally:
        for stand_in in stand_ins:
            del sys.modules[stand_in]


def _deny_distributed() -> None:
    """transformers asks once and remembers the answer."""
    import torch
    from transformers.utils.import_utils import is_torch_distributed_available

    ask, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        is_torch_distributed_available()
    finally:
        torch.distributed.is_available = ask


def _compiler() -> ModuleType:
    """What says of a function how to compile it, and returns it."""
    module = ModuleType(COMPILER)
    vars(module).update(
        __path__=[],  # a package
        disable=lambda function=None, recursive=True, **_: function or (lambda decorated: decorated),
        allow_in_graph=lambda function: function,
        assume_constant_result=lambda function: function,
    )
    return module


def _masks() -> ModuleType:
    """A mode in which transformers makes masks for whole models: looked up when it is wanted."""
    module = ModuleType(MASKS)
    vars(module)["TransformGetItemToIndex"] = lambda: importlib.import_module(MASKS).TransformGetItemToIndex()
    return module
