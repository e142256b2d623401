"""Which models have lost a process, and who asked them."""

from __future__ import annotations

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipeline.triton.instances import Instances, find_askers
from pipeline.triton.model_config import load_base

STUBS = {
    1: "/b/python/triton_python_backend_stub /r/one/1/model.py shm_1",
    2: "/b/python/triton_python_backend_stub /r/two/1/model.py shm_2",
    3: "/b/python/triton_python_backend_stub /r/two/1/model.py shm_3",
    4: "/b/python/triton_python_backend_stub /r/ranks/1/model.py shm_4",
    5: "/b/python/triton_python_backend_stub /r/ranks/1/model.py shm_4",  # another rank, which 4 leads
    6: "something else",
}


def lose(*pids: int) -> dict[str, bool]:
    return Instances(STUBS).find_lost({pid: command for pid, command in STUBS.items() if pid not in pids})


def test_an_instance_is_lost_with_any_of_its_processes() -> None:
    assert lose() == lose(6) == {}
    assert lose(1) == {"one": False}
    assert lose(5) == {"ranks": False}
    assert lose(2) == lose(3) == {"two": True}
    assert lose(2, 3, 4) == {"two": False, "ranks": False}
    assert Instances().find_lost(STUBS) == {}


def test_what_was_loaded_again_is_watched_in_the_place_of_what_was_before() -> None:
    now = {pid: command for pid, command in STUBS.items() if pid != 2} | {7: f"{STUBS[2]}_again"}
    watched = Instances(STUBS).without(["two"], now)
    assert watched.find_lost(now) == {}
    del now[3]  # the one that lived on
    assert watched.find_lost(now) == {}
    del now[7]
    assert watched.find_lost(now) == {"two": False}


def test_who_asks_a_model_that_is_lost_is_lost_with_it() -> None:
    configs = {name: ModelConfig(name=name) for name in ("preprocessing", "tensorrt_llm", "postprocessing", "other")}
    configs["ensemble"] = load_base("ensemble")
    configs["tensorrt_llm_bls"] = text_format.Parse(
        'parameters { key: "tensorrt_llm_model_name" value { string_value: "tensorrt_llm" } }', ModelConfig()
    )
    assert find_askers({"tensorrt_llm"}, configs) == {"tensorrt_llm", "ensemble", "tensorrt_llm_bls"}
    assert find_askers({"postprocessing"}, configs) == {"postprocessing", "ensemble"}
    assert find_askers({"tensorrt_llm_bls"}, configs) == {"tensorrt_llm_bls"}
    assert find_askers(set(), configs) == set()
