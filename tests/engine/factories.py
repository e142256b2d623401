"""Network factories that go wrong, named in build requests in place of the real one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from pipeline.network.network import Network, build_network


def refused(trt: Any, network: Any, spec: Any, architecture: Any, source: Any) -> Network:
    """Attention that no fused kernel can do (MLA's, in a small step) and that must not be decomposed."""
    built = build_network(trt, network, spec, architecture, source)
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = False
    return built


def misshapen(trt: Any, network: Any, spec: Any, architecture: Any, source: Any) -> Network:
    """A sum of two types."""
    built = build_network(trt, network, spec, architecture, source)
    logits = next(t for t in map(network.get_output, range(network.num_outputs)) if t.name == "logits")
    wrong = network.add_elementwise(logits, network.add_cast(logits, trt.float16).get_output(0), _sum(trt))
    wrong.name = "layers.9.wrong"
    network.mark_output(wrong.get_output(0))
    return built


def _sum(trt: Any) -> Any:
    return trt.ElementWiseOperation.SUM


def raises(trt: Any, network: Any, spec: Any, architecture: Any, source: Any) -> Network:
    raise RuntimeError("a mistake in the network's code")


def killed(trt: Any, network: Any, spec: Any, architecture: Any, source: Any) -> Network:
    """What the kernel does to a process for which there is no memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hangs(trt: Any, network: Any, spec: Any, architecture: Any, source: Any) -> Network:
    """Says who it is, then takes its time."""
    Path(os.environ["TRTSEEK_TEST_PID_FILE"]).write_text(str(os.getpid()))
    time.sleep(60)
    raise AssertionError
