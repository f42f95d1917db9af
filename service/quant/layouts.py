"""Converts 4-bit layouts of other projects to our blocks.

Row-major words (compressed-tensors): int32 [rows, cols / 8], column c in bits 4 (c mod 8) of word c / 8. GPTQ: int32
[cols / 8, rows], the same along columns, transposed. AWQ ("gemm"): int32 [cols, rows / 8], eight rows in the bits of a
word in the order 0, 2, 4, 6, 1, 3, 5, 7. Sources: the packing code of compressed-tensors 0.20, GPTQModel and AutoAWQ
0.2.9.
"""

from __future__ import annotations

import torch

from .weight import BLOCK_BYTES, ZERO_NIBBLE, pack_nibbles

# 4-bit numbers per int32.
WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
ZERO_PAIR = ZERO_NIBBLE * 17  # both nibbles of a byte


def blocks_of_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Our int4 blocks uint8 [rows, ceil(n / 16) * 16] from bytes [rows, n]. Byte i has column 2i in its low nibble and
    2i + 1 in its high one.
    """
    rows, count = pairs.shape
    missing = -count % BLOCK_BYTES
    if missing:
        pairs = torch.cat((pairs, pairs.new_full((rows, missing), ZERO_PAIR)), dim=1)
    halves = pairs.reshape(rows, -1, 2, BLOCK_BYTES // 2)
    first, second = halves[:, :, 0], halves[:, :, 1]
    even = (first & 15) | (second << 4)
    odd = (first >> 4) | (second & 240)
    return torch.stack((even, odd), dim=3).view(rows, -1)


def blocks_of_rows(words: torch.Tensor) -> torch.Tensor:
    """Our blocks from row-major words int32 [rows, cols / 8]."""
    return blocks_of_pairs(words.contiguous().view(torch.uint8))


def blocks_of_gptq(words: torch.Tensor) -> torch.Tensor:
    """Our blocks uint8 [rows, ...] from GPTQ words int32 [cols / 8, rows]."""
    return blocks_of_rows(words.t())


def blocks_of_awq(words: torch.Tensor) -> torch.Tensor:
    """Our blocks uint8 [rows, ...] from AWQ words int32 [cols, rows / 8]."""
    return pack_nibbles(awq_nibbles(words).t().contiguous())


def awq_nibbles(words: torch.Tensor) -> torch.Tensor:
    """uint8 [n, rows] from AWQ words int32 [n, rows / 8]."""
    count, width = words.shape
    found = torch.empty((count, width, WORD), dtype=torch.uint8, device=words.device)
    octets = words.contiguous().view(torch.uint8).view(count, width, 4)
    for index, row in enumerate(AWQ_ORDER):
        found[:, :, row] = (octets[:, :, index // 2] >> (4 * (index % 2))) & 15
    return found.view(count, -1)


def word_nibbles(words: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 8 m] from words int32 [n, m], lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), dim=2).view(words.shape[0], -1)
