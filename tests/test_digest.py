import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from pipeline import digest
from pipeline.digest import cached_digest, digest_bytes, digest_file, digest_json, set_digest_cache, sha256_file


@pytest.fixture
def cache(tmp_path):
    set_digest_cache(tmp_path / "store" / "digests.jsonl")
    yield tmp_path / "store" / "digests.jsonl"
    set_digest_cache(None)


def write_old(path, content):
    path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))
    return path


def expect(content):
    return "blake3:" + blake3(content).hexdigest()


def test_published_vector():
    # The first entries of test_vectors.json in the BLAKE3 repository: input bytes 0, 1, 2, … modulo 251.
    assert digest_bytes(b"") == "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest_bytes(bytes([0])) == "blake3:2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"


def test_an_arrays_bytes_are_digested_whatever_its_type():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert digest_bytes(array) == digest_bytes(array.tobytes()) == digest_bytes(memoryview(array))
    assert digest_bytes(np.empty((0, 4), np.float16)) == expect(b"")


def test_json_is_canonical():
    assert digest_json({"b": [1, 2], "a": "é"}) == expect('{"a":"é","b":[1,2]}'.encode())
    with pytest.raises(ValueError, match="JSON"):
        digest_json(float("nan"))


def test_file_is_digested_as_a_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_BUFFER", 7)
    content = bytes(range(256)) * 3
    seen = []
    assert digest_file(write_old(tmp_path / "f", content), on_bytes=seen.append) == expect(content)
    assert sum(seen) == len(content)
    assert max(seen) == 7


def test_cache_knows_a_file_until_it_changes(tmp_path, cache):
    path = write_old(tmp_path / "f", b"one")
    assert cached_digest(path) is None
    assert digest_file(path) == expect(b"one")
    assert cached_digest(path) == expect(b"one")
    status = path.stat()
    path.write_bytes(b"two")
    assert digest_file(path) == expect(b"two")
    # The same size, inode and time: only now is the cache believed, and only where it is asked.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest_file(path) == expect(b"one")
    assert digest_file(path, cached=False) == expect(b"two")


def test_young_file_is_not_cached(tmp_path, cache):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    status = path.stat()
    assert digest_file(path) == expect(b"one")
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # written within the same tick of the clock
    assert digest_file(path) == expect(b"two")
    assert not cache.exists()


def test_file_of_the_future_is_not_cached(tmp_path, cache):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, ns=(time.time_ns() + 10**12,) * 2)
    digest_file(path)
    assert cached_digest(path) is None


def test_file_that_changes_while_it_is_read_is_not_cached(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(digest, "_BUFFER", 4)
    path = write_old(tmp_path / "f", bytes(8))
    times = iter((2 * 10**17, 3 * 10**17))
    digest_file(path, on_bytes=lambda _: os.utime(path, ns=(next(times),) * 2))
    assert cached_digest(path) is None


def test_cache_outlives_the_process_and_torn_lines(tmp_path, cache):
    paths = [write_old(tmp_path / name, name.encode()) for name in "abc"]
    digest_file(paths[0])
    with open(cache, "ab") as file:
        file.write(b'[1, 2, 3, 4, "blake3:torn')
    digest_file(paths[1])
    with open(cache, "ab") as file:
        file.write(b'not json\n{"a": 1}\n[1, 2, 3, 4, 5]\n' + json.dumps([1, 2, 3, 4, expect(b""), 0]).encode())
    set_digest_cache(None)
    set_digest_cache(cache)
    assert [cached_digest(path) for path in paths] == [expect(b"a"), expect(b"b"), None]


def test_any_flipped_bit_of_a_line_is_noticed(tmp_path, cache):
    path = write_old(tmp_path / "f", b"one")
    digest_file(path)
    good = cache.read_bytes()
    for position in range(1, len(good) - 1):
        for bit in (1, 4, 16):
            bad = bytearray(good)
            bad[position] ^= bit
            cache.write_bytes(bad)
            set_digest_cache(None)
            set_digest_cache(cache)
            assert cached_digest(path) in (None, expect(b"one"))


def test_sha256_is_that_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 20_000)
    told: list[int] = []
    stated = subprocess.run(["sha256sum", tmp_path / "file"], capture_output=True, text=True, check=True).stdout
    assert sha256_file(tmp_path / "file", told.append) == stated.split()[0]
    assert sum(told) == 256 * 20_000
