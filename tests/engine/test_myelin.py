from __future__ import annotations

from pipeline.engine.myelin import read_graphs

# Cut down from an engine of TensorRT-RTX 1.7.
GRAPH = b"""header {
  version = 5
  region = { name=devmem_topdown_0 size=1000 alignment=128 instance=0 type=user place=accelerator unified=false }
  region = { name=devmem_topdown_1 size=3000 alignment=128 instance=0 type=user place=accelerator unified=false }
  region = { name=system_hmem size=500 alignment=128 instance=0 type=system place=host unified=false }
  region = { name=consts size=99 alignment=128 instance=0 type=system place=accelerator unified=false constant=true }
  accelerators={sm80 sm86 }
}
descriptors {
  tensor={ alignment=128 dims={ "T.1" 512 } mem_prop=0 name="a b" region="devmem_topdown_1" strides={ 1 } type=half }
  tensor={ alignment=8 dims={ 1 } mem_prop=4 name="host" region="system_hmem" strides={ 1 } type=int64 }
}
main {
 label bb1:
  shape_call={ name="shape" stream=0 }
  function={ name=__myl_MulAdd fqn=__myl_MulAdd_0x1 args={ "a" } }
  function={ name=_gemm_mha_v2 fqn=_gemm_mha_v2_0x2 args={ "a" } }
  fully_connected={ name="layers.0.attention.qkv" output={"a" } }
  runtime_fusion={ name=__myl_FcAdd input_args={ "a" } }
  signal={ name="s" stream=0 event=1 }
  wait={ name="w" stream=0 event=1 }
}
shape_main {
  mul={ name="m" }
}
"""
NESTED = b"header {\n  accelerators={*}\n}\nmain {\n  add={ name=x }\n}\n"


def test_reads_regions_tensors_and_kernels() -> None:
    data = b"\x07\x80" + GRAPH + b"\0" + NESTED + b"\0tail"
    (graph,) = read_graphs(data, 0, len(data))
    assert graph.targets == ("sm80", "sm86")
    assert [(region.name, region.nbytes) for region in graph.regions] == [
        ("devmem_topdown_1", 3000),
        ("devmem_topdown_0", 1000),
    ]
    (tensor,) = graph.regions[0].tensors
    assert (tensor.name, tensor.dtype, tensor.dims) == ("a b", "half", ("T.1", "512"))
    assert graph.regions[1].tensors == ()
    assert graph.workspace_bytes == 4096  # 4000, in granules of 512
    assert graph.kernels == {"_gemm_mha_v2": 1, "fully_connected": 1, "generated": 1, "runtime_fusion": 1}
    assert graph.fusions == {"__myl_FcAdd": 1}


def test_stays_within_bounds() -> None:
    data = GRAPH + b"\0"
    assert list(read_graphs(data, 10, len(data))) == []
    assert list(read_graphs(data, 0, 5)) == []
