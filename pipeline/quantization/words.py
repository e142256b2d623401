"""Eight 4-bit numbers in an int32, as AutoAWQ, GPTQ and compressed-tensors store them: which is in which nibble.

    format              tensor            packed along   order (number of each nibble, the lowest first)
    AutoAWQ GEMM        [I, O/8]          O              0 2 4 6 1 3 5 7
    AutoAWQ GEMM zeros  [I/g, O/8]        O              the same
    compressed-tensors  [O, I/8]          I              0 1 2 3 4 5 6 7
    GPTQ                [I/8, O]          I              the same, transposed; its zeros [I/g, O/8] along O

All are unsigned, 0 to 15; of a symmetric number in [-8, 7] that is 8 more, with 8 as the zero point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import QuantizationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PER_WORD = 8
ZERO = 8  # of symmetric numbers
SEQUENTIAL = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map: two 16-bit halves are unpacked at once on a GPU


def pack_words(numbers: Tensor, order: Sequence[int] = SEQUENTIAL, *, name: str = "weight") -> Tensor:
    """Integers [..., n] in 0 to 15 → int32 [..., n/8]. Raises QuantizationError where 8 does not divide n."""
    import torch

    if numbers.shape[-1] % PER_WORD:
        raise QuantizationError(
            f"{name}: {numbers.shape[-1]} numbers do not fill words of {PER_WORD}",
            hint="leave the linear in 16 bits",
        )
    grouped = numbers.to(torch.uint8).reshape(*numbers.shape[:-1], -1, PER_WORD)
    low, high = grouped[..., list(order[0::2])], grouped[..., list(order[1::2])]
    return (low | high << 4).contiguous().view(torch.int32).squeeze(-1)  # four bytes to a word, the lowest first


def unpack_signed(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n·bits/32] of numbers of 4 or 8 bits, the first lowest → int8 [..., n], less the middle of their
    range."""
    import torch

    numbers = unpack_words(words) if bits == 4 else words.contiguous().view(torch.uint8)
    return (numbers.short() - (1 << (bits - 1))).to(torch.int8)


def unpack_words(words: Tensor, order: Sequence[int] = SEQUENTIAL) -> Tensor:
    """int32 [..., n/8] → uint8 [..., n], 0 to 15."""
    import torch

    numbers = torch.empty(*words.shape, PER_WORD, dtype=torch.uint8)
    for nibble, number in enumerate(order):
        numbers[..., number] = (words >> (4 * nibble)) & 15
    return numbers.flatten(-2)
