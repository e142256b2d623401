"""The table of versions, and what does not belong together."""

from __future__ import annotations

import pytest

from pipeline.config.tensorrt_llm import IMAGE
from pipeline.engine.tensorrt_llm.versions import VERSION, find_image, judge, list_fitting, load_images, load_releases

REGISTRY = "nvcr.io/nvidia/tritonserver"
DIGEST = "@sha256:" + "0123456789abcdef" * 4

# Release notes, PyPI metadata and Dockerfiles: release -> its TensorRT; image -> its TensorRT-LLM and TensorRT.
TENSORRT = {"1.0.0": "~=10.11.0", "1.1.0": "~=10.13.3", "1.2.0": "~=10.14.1", "1.2.1": "~=10.14.1"}
IMAGES = {
    "26.01": ("1.1.0", "10.13.3.9"),
    "26.02": ("1.1.0", "10.13.3.9"),
    "26.03": ("1.2.0rc8", "10.14.1.48"),
    "26.04": ("1.2.1", "10.14.1.48"),
    "26.06": ("1.2.1", "10.14.1.48"),
    "26.07": ("1.2.1", "10.14.1.48"),
}


def test_the_tables_rows():
    releases, images = load_releases(), load_images()
    assert {version: releases[version].tensorrt for version in TENSORRT} == TENSORRT
    assert {name: (images[name].tensorrt_llm, images[name].tensorrt) for name in IMAGES} == IMAGES
    assert releases["1.3.0rc15"].engines and not releases["1.3.0rc22"].engines  # gone after 1.3.0rc20
    assert (images["26.07"].cuda, images["26.07"].python) == ("13.0", "3.12")


def test_an_image_has_the_tensorrt_that_its_release_asks_for():
    for image in load_images().values():
        release = load_releases().get(image.tensorrt_llm)
        if release and image.tensorrt:
            assert image.tensorrt.startswith(f"{release.tensorrt.removeprefix('~=')}.")


def test_what_is_built_for_and_what_builds_it_belong_together():
    assert load_releases()[VERSION].engines
    assert judge(None, IMAGE).fits and judge(VERSION, IMAGE).fits
    assert list_fitting(VERSION) == ["26.04", "26.05", "26.06", "26.07"]


@pytest.mark.parametrize("reference", [f"{REGISTRY}:26.07-trtllm-python-py3", "a:5000/b/c:26.07-trtllm-python-py3"])
def test_references(reference):
    assert find_image(reference).release == find_image(reference + DIGEST).release == "26.07"


@pytest.mark.parametrize(
    ("engine", "image", "said"),
    [
        ("1.1.0", "26.07-trtllm-python-py3", "carries TensorRT-LLM 1.2.1, and this engine is of 1.1.0"),
        ("1.2.0", "26.07-trtllm-python-py3", "loaded only by the release that built it"),
        ("1.2.1", "26.01-trtllm-python-py3", "carries TensorRT-LLM 1.1.0, and this engine is of 1.2.1"),
        ("1.2.1", "26.07-py3", "of no release that is known to carry TensorRT-LLM (26.01"),
        ("1.2.1", "27.01-trtllm-python-py3", "of no release that is known"),
        ("1.2.1", "26.07-trtllm-python-py3@sha256:12", "of no release that is known"),
    ],
)
def test_verdicts(engine, image, said):
    verdict = judge(engine, f"{REGISTRY}:{image}")
    assert not verdict.fits and said in verdict.reason
    fitting = (
        "26.04, 26.05, 26.06, 26.07"
        if engine == "1.2.1"
        else "26.01, 26.02"
        if engine == "1.1.0"
        else "build the engine"
    )
    assert fitting in verdict.way_out
