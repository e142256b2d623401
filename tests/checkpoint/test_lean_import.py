"""What a decoder layer on a CPU never uses is not imported for it, and can be imported afterwards."""

import subprocess
import sys

LEAN = """
import sys
import torch
from pipeline.checkpoint.lean_import import import_lean
from pipeline.checkpoint.reference import MODULES

for package, _ in MODULES.values():
    import_lean(f"transformers.models.{package}.modeling_{package}")
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy", "triton") if name in sys.modules])
"""
AFTERWARDS = """
import torch._dynamo
from transformers.masking_utils import TransformGetItemToIndex

assert torch.distributed.is_available()
assert torch._dynamo.__file__.endswith("__init__.py")
with TransformGetItemToIndex() as mode:
    assert type(mode) is torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex
"""
BEFORE = """
import sys
import torch._dynamo
from pipeline.checkpoint.lean_import import import_lean

compiler = torch._dynamo
import_lean("transformers.models.llama.modeling_llama")
assert torch._dynamo is sys.modules["torch._dynamo"] is compiler
"""


def run(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout


def test_no_compiler_is_imported_and_it_still_can_be() -> None:
    assert run(LEAN + AFTERWARDS) == "[]\n"


def test_a_compiler_that_is_there_stays() -> None:
    run(BEFORE)
