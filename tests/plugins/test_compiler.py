"""Kernels compile for every target without a GPU, and keep their values in registers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.errors import BuildError
from plugins.compiler import SMS, compile_kernel
from plugins.operation import Kernel
from plugins.rope_paged_kv.operation import RopePagedKv, RopePagedLatent
from tests.plugins.test_rope_paged_kv import HEADS


@pytest.mark.parametrize("sm", SMS)
def test_ptx_is_for_its_target_and_names_no_file(sm: int) -> None:
    made = compile_kernel(HEADS.kernels()[0], sm)
    assert f".target sm_{sm}".encode() in made.ptx
    assert made.entry.encode() in made.ptx
    assert b"kernel.py" not in made.ptx and b".loc" not in made.ptx
    # Two pointers of Triton's own follow the kernel's parameters: what the driver is given for nothing.
    assert (
        made.ptx.count(b".param .u64") + made.ptx.count(b".param .u32") + made.ptx.count(b".param .f32")
        == len(HEADS.kernels()[0].parameters) + 2
    )
    assert (made.threads, made.spills) == (128, 0)


def test_fp8_needs_sm89() -> None:
    (kernel,) = replace(HEADS, pool_dtype="fp8").kernels()
    with pytest.raises(BuildError, match=r"write_heads does not compile for SM80: .*fp8e4nv.*, at `def write_heads\(`"):
        compile_kernel(kernel, 80)
    assert compile_kernel(kernel, 89).spills == 0


def test_a_mistake_is_shown_where_it_is() -> None:
    kernel = Kernel(
        module="tests.plugins.broken",
        function="copy",
        parameters=(("source", "*fp16"), ("target", "*fp16")),
        constants=(("TILE", 128),),
        warps=4,
    )
    with pytest.raises(BuildError) as caught:
        compile_kernel(kernel, 80)
    assert caught.value.message == (
        "kernel copy does not compile for SM80: NameError('missing is not defined'), at `return x + missing`"
    )


@pytest.mark.parametrize("op", [RopePagedKv, RopePagedLatent])
def test_contracts_name_all_inputs(op: type[RopePagedKv] | type[RopePagedLatent]) -> None:
    names = [name for name, _ in op.INPUTS]
    assert names[-1] == "scales?" and not any(name.endswith("?") for name in names[:-1])
    for name in names:
        assert name.removesuffix("?") in (op.__doc__ or "")
