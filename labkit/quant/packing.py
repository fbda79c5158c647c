"""The fixed bit layouts: signed codes to bytes and back, for W4 and W3.

Both directions work on whole tensors, on any device: eight codes (one a byte) are read as
one 64-bit word, and the unused bits are squeezed out with three shifts. Byte order is
little-endian, which is that of every machine torch runs on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.errors import require

CODE_RANGE: dict[str, tuple[int, int]] = {"w4": (-8, 7), "w3": (-4, 3), "q4_0": (-8, 7), "q8_0": (-128, 127)}
"""Smallest and largest code of each format."""

PACK_MULTIPLE: dict[str, int] = {"w4": 2, "w3": 8}
"""Codes that fill whole bytes: a packed row holds a multiple of this many."""


def pack_w4(codes: Tensor) -> Tensor:
    """Pack signed 4-bit codes: low nibble = even k, high nibble = odd k, two's complement.

    Args:
        codes: int8 [N, K], K even, values -8..7.

    Returns:
        uint8 [N, K/2].

    Raises:
        InputError: wrong dtype or rank, odd K, or a value outside -8..7.
    """
    codes = _checked_codes(codes, "w4")
    n, k = codes.shape
    pairs = codes.view(torch.int16)  # [N, K/2]: even k in the low byte, odd k in the high byte
    packed = pairs & 0x000F
    packed |= (pairs >> 4) & 0x00F0
    return packed.to(torch.uint8).view(n, k // 2)


def unpack_w4(packed: Tensor, k: int) -> Tensor:
    """Undo :func:`pack_w4`.

    Args:
        packed: uint8 [N, at least ceil(k/2)].
        k: how many codes of a row are wanted.

    Returns:
        int8 [N, k], values -8..7.
    """
    packed = _checked_packed(packed, "w4", k)
    wide = packed.to(torch.int16)
    pairs = (wide & 0xF0) << 4
    wide &= 0x0F
    pairs |= wide
    return _sign_extend(pairs.view(torch.int8), 8, k)


def pack_w3(codes: Tensor) -> Tensor:
    """Pack eight signed 3-bit codes into three bytes: code i takes bits 3i..3i+2 of the 24.

    Args:
        codes: int8 [N, K], K a multiple of 8, values -4..3.

    Returns:
        uint8 [N, 3K/8].

    Raises:
        InputError: wrong dtype or rank, K not a multiple of 8, or a value outside -4..3.
    """
    codes = _checked_codes(codes, "w3")
    n, k = codes.shape
    word = codes.view(torch.int64) & 0x0707070707070707  # [N, K/8]: one code a byte
    word |= word >> 5
    word &= 0x003F003F003F003F  # two codes every 16 bits
    word |= word >> 10
    word &= 0x00000FFF00000FFF  # four codes every 32 bits
    word |= word >> 20
    return word.view(torch.uint8).view(n, k // 8, 8)[..., :3].reshape(n, k // 8 * 3)


def unpack_w3(packed: Tensor, k: int) -> Tensor:
    """Undo :func:`pack_w3`.

    Args:
        packed: uint8 [N, at least 3*ceil(k/8)], a multiple of 3 columns.
        k: how many codes of a row are wanted.

    Returns:
        int8 [N, k], values -4..3.
    """
    packed = _checked_packed(packed, "w3", k)
    n, width = packed.shape
    # The top five bytes of each word stay zero.
    padded = torch.zeros(n, width // 3, 8, dtype=torch.uint8, device=packed.device)
    padded[..., :3] = packed.view(n, width // 3, 3)
    word = padded.view(torch.int64).view(n, width // 3)
    word |= word << 20
    word &= 0x00000FFF00000FFF
    word |= word << 10
    word &= 0x003F003F003F003F
    word |= word << 5
    word &= 0x0707070707070707
    return _sign_extend(word.view(torch.int8), 4, k)


def pack(codes: Tensor, format: str) -> Tensor:
    """:func:`pack_w4` or :func:`pack_w3`, by name of the format."""
    return pack_w4(codes) if format == "w4" else pack_w3(codes)


def unpack(packed: Tensor, k: int, format: str) -> Tensor:
    """:func:`unpack_w4` or :func:`unpack_w3`, by name of the format."""
    return unpack_w4(packed, k) if format == "w4" else unpack_w3(packed, k)


def _sign_extend(codes: Tensor, sign: int, k: int) -> Tensor:
    """Turn unsigned fields into signed codes in place: flip the sign bit, then subtract it."""
    codes ^= sign
    codes -= sign
    return codes if codes.shape[1] == k else codes[:, :k]


def _checked_codes(codes: Tensor, format: str) -> Tensor:
    require(
        isinstance(codes, Tensor) and codes.dtype == torch.int8 and codes.ndim == 2,
        "codes",
        describe(codes),
        "int8 [N, K]",
    )
    multiple = PACK_MULTIPLE[format]
    k = codes.shape[1]
    require(
        k % multiple == 0,
        "codes",
        f"K = {k}",
        f"K a multiple of {multiple} ({format} fills whole bytes)",
        "pad the codes with zeros, or use labkit.quant.quantize, which pads",
    )
    low, high = CODE_RANGE[format]
    if codes.numel():
        smallest, largest = (int(value) for value in codes.aminmax())
        require(
            low <= smallest and largest <= high,
            "codes",
            f"values {smallest}..{largest}",
            f"{low}..{high} ({format})",
        )
    # The wide views below need rows that start on a word: a slice of a larger tensor may not.
    codes = codes.contiguous()
    aligned = codes.storage_offset() % 8 == 0
    return codes if aligned else codes.clone()


def _checked_packed(packed: Tensor, format: str, k: int) -> Tensor:
    require(
        isinstance(packed, Tensor) and packed.dtype == torch.uint8 and packed.ndim == 2,
        "packed",
        describe(packed),
        "uint8 [N, bytes of a row]",
    )
    width = packed.shape[1]
    whole, held = (True, width * 2) if format == "w4" else (width % 3 == 0, width // 3 * 8)
    require(
        whole and 0 <= k <= held,
        "k" if whole else "packed",
        f"k = {k} from rows of {width} bytes",
        f"0 <= k <= {held} codes" if whole else "rows of a multiple of 3 bytes",
    )
    return packed.contiguous()


def describe(value: object) -> str:
    """Dtype and shape of a tensor, or the type of anything else, for an error message."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
