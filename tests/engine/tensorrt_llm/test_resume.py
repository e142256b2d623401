"""An engine that comes back: taken only if it is what the job asked for, and nothing of it is believed before."""

from __future__ import annotations

import json
import os

import pytest

from pipeline.engine.tensorrt_llm import engine_folder
from pipeline.engine.tensorrt_llm.builder import take_engine
from pipeline.engine.tensorrt_llm.engine_folder import read_engine_folder
from pipeline.engine.tensorrt_llm.job import read_request
from pipeline.engine.tensorrt_llm.record import RECORD, load_record
from pipeline.engine.tensorrt_llm.resume import NO_RECEIPT, check_engine
from pipeline.errors import BuildError
from pipeline.progress import SILENT
from pipeline.sharding.ranks import Parallel
from tests.engine.tensorrt_llm.gpu_host import build, copy, make_host, make_job, make_small_request, seal


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A job of two ranks, and the engine that a host made of it."""
    folder = tmp_path_factory.mktemp("resume")
    with pytest.MonkeyPatch.context() as monkeypatch:
        job = make_job(folder / "job", make_small_request(monkeypatch, parallel=Parallel(tensor=2)))
    return job, build(job, folder / "engine", make_host(folder / "host"))


@pytest.fixture
def job(made):
    return made[0]


@pytest.fixture
def engine(made, tmp_path):
    """A copy to be spoiled."""
    return copy(made[1], tmp_path / "engine")


def edit(engine, path, value):
    """Sets "a.b" in config.json, and sums up again: what differs is what was built, not the copy."""
    document = json.loads((engine / "config.json").read_text())
    *above, last = path.split(".")
    place = document
    for key in above:
        place = place[key]
    place[last] = value
    (engine / "config.json").write_text(json.dumps(document))
    seal(engine)


def refuse(engine, job):
    """What is said. Nothing is written."""
    folder = engine.parent / "taken"
    folder.mkdir(exist_ok=True)
    with pytest.raises(BuildError) as caught:
        take_engine(engine, job, folder, read_request(job), "blake3:0", SILENT)
    assert list(folder.iterdir()) == []
    return caught.value


def test_what_was_asked_is_taken(tmp_path, job, engine):
    (engine / "notes.txt").write_text("somebody's own")
    folder = tmp_path / "build"
    folder.mkdir()
    record = take_engine(engine, job, folder, read_request(job), "blake3:0", SILENT)
    assert load_record(folder) == record
    assert (record.version, record.sm, record.tensorrt) == ("1.2.1", 90, "10.14.1.48")
    assert record.network_digest == "blake3:0" and record.image.endswith(":26.07-trtllm-python-py3")
    taken = sorted(path.name for path in (folder / "engine").iterdir())
    assert taken == ["SHA256SUMS", "build.log", "config.json", "rank0.engine", "rank1.engine", "receipt.json"]
    assert (folder / "engine/rank1.engine").read_bytes() == (engine / "rank1.engine").read_bytes()
    assert record.nbytes == sum(path.stat().st_size for path in (folder / "engine").iterdir())


# what config.json states in the place of what was asked, and what is said of it
DIFFERENCES = [
    ("version", "1.1.0", "version is 1.1.0, asked for 1.2.1: nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"),
    ("pretrained_config.mapping.tp_size", 1, "pretrained_config.mapping.tp_size is 1, asked for 2"),
    ("pretrained_config.mapping.moe_ep_size", 2, "pretrained_config.mapping.moe_ep_size is 2, asked for 1"),
    ("pretrained_config.quantization.quant_algo", "W4A16_AWQ", 'quant_algo is "W4A16_AWQ", asked for "FP8"'),
    ("pretrained_config.quantization.kv_cache_quant_algo", None, 'kv_cache_quant_algo is null, asked for "FP8"'),
    ("pretrained_config.quantization.exclude_modules", ["*lm_head"], 'exclude_modules is ["*lm_head"], asked for'),
    ("pretrained_config.dtype", "bfloat16", 'pretrained_config.dtype is "bfloat16", asked for "float16"'),
    ("pretrained_config.logits_dtype", "float16", 'logits_dtype is "float16", asked for "float32"'),
    ("pretrained_config.num_hidden_layers", 5, "num_hidden_layers is 5, asked for 4"),
    ("pretrained_config.rotary_scaling", None, "pretrained_config.rotary_scaling is None, not a map"),
    ("build_config.max_seq_len", 65536, "build_config.max_seq_len is 65536, asked for 1024"),
    ("build_config.max_batch_size", 2048, "build_config.max_batch_size is 2048, asked for 8"),
    ("build_config.kv_cache_type", "CONTINUOUS", 'kv_cache_type is "CONTINUOUS", asked for "PAGED"'),
    ("build_config.plugin_config.tokens_per_block", 64, "plugin_config.tokens_per_block is 64, asked for 32"),
    ("build_config.plugin_config.use_fp8_context_fmha", False, "use_fp8_context_fmha is false, asked for true"),
    ("build_config.plugin_config.use_paged_context_fmha", 1, "use_paged_context_fmha is 1, asked for true"),
    ("build_config.plugin_config.gpt_attention_plugin", None, 'gpt_attention_plugin is null, asked for "auto"'),
    ("build_config.plugin_config.gemm_plugin", "fp8", 'gemm_plugin is "fp8", asked for null'),
    ("build_config.plugin_config", {}, "build_config.plugin_config.tokens_per_block is not stated"),
    ("pretrained_config.quantization", "FP8", "pretrained_config.quantization is 'FP8', not a map"),
]


@pytest.mark.parametrize(("path", "value", "said"), DIFFERENCES, ids=[row[0] for row in DIFFERENCES])
def test_another_engine_is_refused(engine, job, path, value, said):
    edit(engine, path, value)
    error = refuse(engine, job)
    assert said in error.message and error.message.startswith(f"{engine} is not the engine that was asked for:\n  ")


def test_every_difference_is_in_one_message(engine, job):
    for path, value, _ in DIFFERENCES[:-2]:
        edit(engine, path, value)
    (engine / "rank1.engine").unlink()
    lines = refuse(engine, job).message.splitlines()[1:]
    assert [sum(said in line for line in lines) for *_, said in DIFFERENCES[:-2]] == [1] * len(DIFFERENCES[:-2])
    assert "  rank1.engine is missing, of 2 rank(s)" in lines


def test_what_trtllm_build_may_write_otherwise(engine, job):
    edit(engine, "build_config.plugin_config.gpt_attention_plugin", "float16")  # auto, of a float16 model
    edit(engine, "build_config.opt_num_tokens", 8)
    edit(engine, "pretrained_config.quantization.exclude_modules", ["*router", "*lm_head"])
    edit(engine, "pretrained_config.a_later_key", {"of": "its own"})
    assert check_engine(read_engine_folder(engine), job) == []


def test_ranks_that_are_missing_or_too_many(engine, job):
    (engine / "rank2.engine").write_bytes(b"of another job")
    (engine / "rank0.engine").unlink()
    seal(engine)
    message = refuse(engine, job).message
    assert "rank0.engine is missing, of 2 rank(s)" in message and "rank2.engine is one too many" in message


def test_an_absurd_number_of_ranks(engine, job):
    edit(engine, "pretrained_config.mapping.world_size", 99999)
    message = refuse(engine, job).message
    assert "world_size is 99999, asked for 2" in message and "99989 more are missing" in message
    assert len(message) < 2000


def test_what_it_states_controls_no_terminal(engine, job):
    edit(engine, "pretrained_config.dtype", "float16\x1b]0;owned\x07")
    assert "\x1b" not in refuse(engine, job).message
    edit(engine, "version", "1.2.1\x1b[2J")
    assert refuse(engine, job).message.endswith("states no version of TensorRT-LLM")


def test_a_file_that_was_cut_off_on_the_way(engine, job):
    weights = engine / "rank1.engine"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "rank1.engine is not what SHA256SUMS says: cut off or changed on the way" in refuse(engine, job).message
    weights.write_bytes(b"")
    seal(engine)
    assert "rank1.engine is empty" in refuse(engine, job).message


def test_sums_that_leave_a_file_out_or_name_one_elsewhere(engine, job):
    sums = (engine / "SHA256SUMS").read_text().splitlines()
    (engine / "SHA256SUMS").write_text("\n".join([*sums[1:], "0" * 64 + "  ../../../etc/passwd"]) + "\n\x00")
    message = refuse(engine, job).message
    assert f"{sums[0].split('  ')[1]} is not named in SHA256SUMS" in message
    assert "'../../../etc/passwd' is named in SHA256SUMS and missing" in message


def test_an_engine_of_other_weights(engine, job, tmp_path):
    """config.json cannot tell; the receipt can."""
    receipt = json.loads((engine / "receipt.json").read_text())
    (engine / "receipt.json").write_text(json.dumps({**receipt, "job": "0" * 64, "sm": 80, "tensorrt": "10.13.3.9"}))
    seal(engine)
    message = refuse(engine, job).message
    assert "the receipt is of another job: of other weights" in message
    assert "it was built on SM80, asked for SM90 (H100)" in message
    assert "built with TensorRT '10.13.3.9', and TensorRT-LLM 1.2.1 is of 10.14.1" in message


def test_without_a_receipt_it_is_said_what_is_not_known(engine, job):
    (engine / "receipt.json").unlink()
    (engine / "SHA256SUMS").unlink()
    assert check_engine(read_engine_folder(engine), job) == [NO_RECEIPT]


JSON = [
    ("config.json", b'{"version": "1.2.1", "pretrained_config": {"mapp', "damaged: Unterminated string"),
    ("config.json", b"", "damaged: "),
    ("config.json", b"[" * 100_000, "damaged: "),
    ("config.json", b"\xff\xfe\x00", "damaged: "),
    ("config.json", b"[]", "holds no JSON object"),
    ("config.json", b'{"version": 1.2, "pretrained_config": {}}', "states no version"),
    ("config.json", b'{"version": "1.2.1", "pretrained_config": {"mapping": {}}}', "states no build_config"),
    (
        "config.json",
        b'{"version": "1.2.1", "build_config": {}, "pretrained_config": []}',
        "states no pretrained_config",
    ),
    (
        "config.json",
        b'{"version": "1.2.1", "build_config": {}, "pretrained_config": {"mapping": {"world_size": 1e9}}}',
        "world_size is 1000000000.0",
    ),
    ("receipt.json", b'{"job": ', "damaged: "),
    ("receipt.json", b"null", "holds no JSON object"),
]


@pytest.mark.parametrize(("name", "content", "said"), JSON, ids=[f"{row[0]}: {row[2]}" for row in JSON])
def test_damaged_json(engine, job, name, content, said):
    (engine / name).write_bytes(content)
    assert said in refuse(engine, job).message


def test_a_document_of_absurd_size(engine, job, monkeypatch):
    monkeypatch.setattr(engine_folder, "MAX_JSON", 100)
    assert "damaged: more than" in refuse(engine, job).message


@pytest.mark.parametrize("name", ["config.json", "rank1.engine", "receipt.json", "SHA256SUMS"])
def test_links_are_not_followed(engine, job, tmp_path, name):
    secret = tmp_path / "secret"
    (engine / name).rename(secret)
    (engine / name).symlink_to(secret)
    error = refuse(engine, job)
    assert error.message == f"{engine / name}: is a link" and "without links" in error.hint


def test_other_than_files(engine, job):
    (engine / "rank1.engine").unlink()
    os.mkfifo(engine / "rank1.engine")
    assert refuse(engine, job).message.endswith("rank1.engine: is no plain file")
    (engine / "rank1.engine").unlink()
    (engine / "rank1.engine").mkdir()
    assert refuse(engine, job).message.endswith("rank1.engine: is no plain file")


def test_what_is_no_engine_folder(tmp_path, job, engine):
    with pytest.raises(BuildError, match="there is no such folder"):
        read_engine_folder(tmp_path / "nowhere")
    with pytest.raises(BuildError, match="is not a folder"):
        read_engine_folder(engine / "config.json")
    (engine / "config.json").unlink()
    assert "holds no config.json" in refuse(engine, job).message


def test_a_record_that_is_damaged(tmp_path):
    with pytest.raises(BuildError, match="No such file"):
        load_record(tmp_path)
    (tmp_path / RECORD).write_text('{"format": 1, "version": "1.2.1"}')
    with pytest.raises(BuildError, match="does not describe an engine"):
        load_record(tmp_path)
