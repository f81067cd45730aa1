# SPDX-License-Identifier: Apache-2.0
"""FarmHash's Fingerprint64 and the hash that crosses features, for many strings at once.

The functions below work on arrays of uint64, one element per string, whose arithmetic is modulo 2**64.

Source: FarmHash, farmhashna::Hash64; tensorflow/core/platform/fingerprint.h for FingerprintCat64.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = Any
"""An array of uint64. NumPy's types know nothing of its arithmetic with large integers of Python."""

# k0, k1 and k2 of farmhash.cc. Then kMul of TensorFlow's FingerprintCat64, and the seed of farmhashna::Hash64.
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_CAT, _SEED, _BLOCK = 0xC6A4A7935BD1E995, 81, 64


def fingerprint64(texts: Sequence[bytes]) -> Words:
    """Returns the Fingerprint64 of each string.

    Args:
      texts: the strings.

    Example:
      >>> fingerprint64([b"", b"red"]).tolist()
      [11160318154034397263, 991092756973969910]
    """
    # Strings of one length take the same branches, so that each group is one array operation per line of the C code.
    places: dict[int, list[int]] = {}
    for place, text in enumerate(texts):
        places.setdefault(len(text), []).append(place)
    result = np.empty(len(texts), np.uint64)
    for length, group in places.items():
        data = np.frombuffer(b"".join(texts[place] for place in group), np.uint8).reshape(len(group), length)
        result[group] = _of_length(length)(data)
    return result


def concatenated(first: Words, second: Words) -> Words:
    """Returns FingerprintCat64: the fingerprint of two fingerprints, element by element.

    Args:
      first: array of uint64.
      second: array of uint64 that broadcasts with it.
    """
    result = first ^ _CAT ^ _mixed(second * _CAT) * _CAT
    return _mixed(_mixed(result * _CAT) * _CAT)


def _of_length(length: int) -> Callable[[NDArray[np.uint8]], Words]:
    bounds = ((0, _empty), (3, _up_to_3), (7, _up_to_7), (16, _up_to_16), (32, _up_to_32), (64, _up_to_64))
    return next((function for bound, function in bounds if length <= bound), _longer)


def _empty(data: NDArray[np.uint8]) -> Words:
    return np.full(len(data), _K2, np.uint64)


def _up_to_3(data: NDArray[np.uint8]) -> Words:
    length = data.shape[1]
    first, middle, last = (data[:, i].astype(np.uint64) for i in (0, length >> 1, length - 1))
    # HashLen0to16 reads three bytes for 1 to 3 bytes: in short strings, some are the same byte.
    return _mixed((first + (middle << 8)) * _K2 ^ (length + (last << 2)) * _K0) * _K2


def _up_to_7(data: NDArray[np.uint8]) -> Words:
    length = data.shape[1]
    return _hashed(length + (_word(data, 0, 4) << 3), _word(data, length - 4, 4), _factor(data))


def _up_to_16(data: NDArray[np.uint8]) -> Words:
    factor, end = _factor(data), data.shape[1]
    first, last = _word(data, 0) + _K2, _word(data, end - 8)
    return _hashed(_rotated(last, 37) * factor + first, (_rotated(first, 25) + last) * factor, factor)


def _up_to_32(data: NDArray[np.uint8]) -> Words:
    factor, end = _factor(data), data.shape[1]
    a, b = _word(data, 0) * _K1, _word(data, 8)
    c, d = _word(data, end - 8) * factor, _word(data, end - 16) * _K2
    return _hashed(*_stirred(a, b, c, d), factor)


def _up_to_64(data: NDArray[np.uint8]) -> Words:
    factor, end = _factor(data), data.shape[1]
    a, b = _word(data, 0) * _K2, _word(data, 8)
    c, d = _word(data, end - 8) * factor, _word(data, end - 16) * _K2
    y, z = _stirred(a, b, c, d)
    z = _hashed(y, z, factor)
    e, f = _word(data, 16) * factor, _word(data, 24)
    g, h = (y + _word(data, end - 32)) * factor, (z + _word(data, end - 24)) * factor
    return _hashed(_rotated(e + f, 43) + _rotated(g, 30) + h, e + _rotated(f + a, 18) + g, factor)


class _HashState(NamedTuple):
    """What the blocks of a long string are mixed into."""

    x: Words
    y: Words
    z: Words
    v: tuple[Words, Words]
    w: tuple[Words, Words]


def _longer(data: NDArray[np.uint8]) -> Words:
    end = data.shape[1]
    zero = np.zeros(len(data), np.uint64)
    y = zero + (_SEED * _K1 + 113) % 2**64
    x = _word(data, 0) + (_SEED * _K2) % 2**64
    state = _HashState(x, y, _mixed(y * _K2 + 113) * _K2, (zero, zero), (zero, zero))
    # The last block is the last 64 bytes, even if it overlaps the one before: FarmHash pads nothing.
    for start in range(0, (end - 1) // _BLOCK * _BLOCK, _BLOCK):
        state = _with_block(state, data[:, start : start + _BLOCK], _K1, 1)
    factor = _K1 + ((state.z & 0xFF) << 1)
    w = state.w[0] + (end - 1) % _BLOCK
    v = state.v[0] + w
    state = state._replace(v=(v, state.v[1]), w=(w + v, state.w[1]))
    x, y, z, v, w = _with_block(state, data[:, end - _BLOCK :], factor, 9)
    first = _hashed(v[0], w[0], factor) + _mixed(y) * _K0 + z
    return _hashed(first, _hashed(v[1], w[1], factor) + x, factor)


def _with_block(state: _HashState, block: NDArray[np.uint8], factor: Words, weight: int) -> _HashState:
    """Returns the state after 64 bytes. The last block has its own factors."""
    x, y, z, v, w = state
    x = _rotated(x + y + v[0] + _word(block, 8), 37) * factor
    y = _rotated(y + v[1] + _word(block, 48), 42) * factor
    x ^= w[1] * weight
    y += v[0] * weight + _word(block, 40)
    z = _rotated(z + w[0], 33) * factor
    v = _weak(block, 0, v[1] * factor, x + w[0])
    w = _weak(block, 32, z + w[1], y + _word(block, 16))
    return _HashState(z, y, x, v, w)


def _weak(block: NDArray[np.uint8], start: int, a: Words, b: Words) -> tuple[Words, Words]:
    """Returns a weak hash of 32 bytes with two seeds."""
    first, second, third, fourth = (_word(block, start + offset) for offset in (0, 8, 16, 24))
    a = a + first
    b = _rotated(b + a + fourth, 21)
    total = a + second + third
    return total + fourth, b + _rotated(total, 44) + a


def _stirred(a: Words, b: Words, c: Words, d: Words) -> tuple[Words, Words]:
    return _rotated(a + b, 43) + _rotated(c, 30) + d, a + _rotated(b + _K2, 18) + c


def _hashed(low: Words, high: Words, factor: Words) -> Words:
    first = _mixed((low ^ high) * factor)
    return _mixed((high ^ first) * factor) * factor


def _mixed(words: Words) -> Words:
    return words ^ (words >> 47)


def _rotated(words: Words, bits: int) -> Words:
    return (words >> bits) | (words << (64 - bits))


def _factor(data: NDArray[np.uint8]) -> int:
    return _K2 + 2 * int(data.shape[1])


def _word(data: NDArray[np.uint8], start: int, size: int = 8) -> Words:
    """Returns the little-endian integer at a place of each string."""
    words = np.ascontiguousarray(data[:, start : start + size]).view(f"<u{size}")
    return words[:, 0].astype(np.uint64)
