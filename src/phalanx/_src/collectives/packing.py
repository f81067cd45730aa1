# SPDX-License-Identifier: Apache-2.0
"""Assigns arrays to shared buffers. Pure arithmetic."""

from collections.abc import Sequence

# On CPUs, XLA compiles one kernel per position in a buffer, in about 10 ms, and reuses it for buffers with the same layout.
# Compiling 1,000 arrays took 24 s in one buffer, and less than 3 s in buffers of 32.
ARRAYS_IN_A_BUFFER = 32
# Between processes a message costs 0.2 ms plus its bytes, and several milliseconds if the processes share cores.
ARRAYS_IN_A_MESSAGE = 64


def by_count(dtypes: Sequence[str], sizes_bytes: Sequence[int], num_packs: int) -> list[list[int]]:
    """Assigns arrays, in order, to at most `num_packs` buffers per dtype, of about equal size.

    Args:
      dtypes: dtype of each array. A buffer has one dtype.
      sizes_bytes: size of each array, in bytes.
      num_packs: maximum number of buffers per dtype. 0 means one array per buffer.

    Returns:
      The indices of the arrays in each buffer.

    Example:
      >>> by_count(["f4"] * 4, [4, 4, 4, 4], 2)
      [[0, 1], [2, 3]]
    """
    if num_packs == 0:
        return [[i] for i in range(len(dtypes))]
    return [pack for group in _by_dtype(dtypes) for pack in _even(group, sizes_bytes, num_packs)]


def by_bytes(dtypes: Sequence[str], sizes_bytes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Fills buffers in order, closing each once it holds `bytes_per_pack` bytes. 0 means one buffer per dtype.

    Example:
      >>> by_bytes(["f4", "f4", "i4", "f4"], [8, 8, 8, 8], 10)
      [[0, 1], [3], [2]]
    """
    groups = _by_dtype(dtypes)
    return groups if bytes_per_pack == 0 else [p for g in groups for p in _greedy(g, sizes_bytes, bytes_per_pack)]


def by_length(dtypes: Sequence[str], length: int = ARRAYS_IN_A_BUFFER) -> list[list[int]]:
    """Fills buffers in order, with at most `length` arrays per buffer.

    Example:
      >>> by_length(["f4", "f4", "f4"], 2)
      [[0, 1], [2]]
    """
    return no_longer_than(length, _by_dtype(dtypes))


def no_longer_than(length: int, packs: Sequence[list[int]]) -> list[list[int]]:
    """Splits buffers of more than `length` arrays, in order.

    Example:
      >>> no_longer_than(2, [[0, 1, 2], [3]])
      [[0, 1], [2], [3]]
    """
    return [pack[i : i + length] for pack in packs for i in range(0, len(pack), length)]


def small_together(dtypes: Sequence[str], sizes_bytes: Sequence[int], limit: int) -> list[list[int]]:
    """Assigns arrays of at most `limit` bytes to shared buffers, and each larger array to its own buffer.

    Example:
      >>> small_together(["f4"] * 4, [4, 400, 4, 4], 100)
      [[0, 2, 3], [1]]
    """
    small = [i for i, size in enumerate(sizes_bytes) if size <= limit]
    shared = [[small[k] for k in pack] for pack in by_length([dtypes[i] for i in small])]
    return shared + [[i] for i, size in enumerate(sizes_bytes) if size > limit]


def _by_dtype(dtypes: Sequence[str]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        groups.setdefault(dtype, []).append(i)
    return list(groups.values())


def _even(group: list[int], sizes_bytes: Sequence[int], num_packs: int) -> list[list[int]]:
    total = max(1, sum(sizes_bytes[i] for i in group))  # All arrays may be empty.
    packs: dict[int, list[int]] = {}
    start = 0
    for i in group:
        packs.setdefault(min(num_packs - 1, start * num_packs // total), []).append(i)
        start += sizes_bytes[i]
    return list(packs.values())


def _greedy(group: list[int], sizes_bytes: Sequence[int], limit: int) -> list[list[int]]:
    packs: list[list[int]] = [[]]
    filled = 0
    for i in group:
        if packs[-1] and filled >= limit:
            packs.append([])
            filled = 0
        packs[-1].append(i)
        filled += sizes_bytes[i]
    return packs
