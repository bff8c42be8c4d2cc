"""Filling sequences of a fixed length with whole documents."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of at most `capacity` tokens that hold every document once and whole.

    Longest documents first, each into the bin that it fills best (Johnson 1974, "best fit decreasing"). Equal inputs
    give equal bins; documents inside a bin, and bins among themselves, keep the order of their first document.

    Args:
        lengths: tokens of each document, all between 1 and `capacity`.
        capacity: tokens of a bin.

    Returns:
        indices of the documents in each bin.

    Raises:
        ValueError: a document does not fit into a bin.
    """
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (space left, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        length = lengths[index]
        if not 0 < length <= capacity:
            raise ValueError(f"document {index} has {length} tokens, a bin holds 1 to {capacity}")
        at = bisect.bisect_left(open_bins, (length, -1))
        if at == len(open_bins):
            bins.append([index])
            space, number = capacity - length, len(bins) - 1
        else:
            space, number = open_bins.pop(at)
            bins[number].append(index)
            space -= length
        if space:
            bisect.insort(open_bins, (space, number))
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])
