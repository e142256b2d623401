"""Words of eight nibbles, against numbers written out by hand and compressed-tensors' own packing."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.quantization.words import AWQ, SEQUENTIAL, pack_words, unpack_words


def test_words_as_the_formats_spell_them() -> None:
    numbers = torch.arange(8)[None]
    assert pack_words(numbers).tolist() == [[0x76543210]]
    assert pack_words(numbers, AWQ).tolist() == [[0x75316420]]  # AutoAWQ's order_map 0 2 4 6 1 3 5 7
    assert pack_words(torch.tensor([[0] * 7 + [15]])).tolist() == [[0xF0000000 - (1 << 32)]]


def test_packed_as_compressed_tensors_packs() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    q = torch.randint(-8, 8, (6, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    assert torch.equal(pack_words(q + 8), pack_to_int32(q, 4))


@pytest.mark.parametrize("order", [SEQUENTIAL, AWQ])
def test_every_number_comes_back(order: tuple[int, ...]) -> None:
    numbers = torch.randint(0, 16, (3, 5, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    assert torch.equal(unpack_words(pack_words(numbers, order), order), numbers)


def test_numbers_that_fill_no_word_are_refused() -> None:
    with pytest.raises(QuantizationError, match=r"layer\.o: 12 numbers"):
        pack_words(torch.zeros(2, 12, dtype=torch.uint8), name="layer.o")
