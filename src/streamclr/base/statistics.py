"""Means and shares with their 95 % intervals, and evenly spaced samples."""

import math
from collections.abc import Iterable, Sequence
from statistics import mean, stdev

import numpy as np

Z = 1.959964  # the 97.5 % quantile of the normal distribution
# The 97.5 % quantiles of Student's t distribution with 1, 2, ... 14 degrees of freedom.
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half-width of its 95 % interval by Student's t; of one value the half-width is 0."""
    if len(values) == 1:
        return values[0], 0.0
    return mean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if freedom <= len(T):
        return T[freedom - 1]
    # Abramowitz and Stegun, 26.7.5, to the third order: right to four decimals from here on.
    terms = ((Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96, (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384)
    return Z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


def mean_by(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of the values at each x, in the order of x."""
    values: dict[float, list[float]] = {}
    for x, value in points:
        values.setdefault(x, []).append(value)
    return [(x, mean(values[x])) for x in sorted(values)]


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share of which `right` out of `n` were seen (Wilson 1927)."""
    share, spread = right / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def spread(values: Sequence[float], digits: int = 1, unit: str = "") -> str:
    """A table's cell: the mean ± the half-width of its 95 % interval, the value alone if there is one, – if none."""
    if not values:
        return "–"
    middle, half = mean_interval(values)
    return f"{middle:,.{digits}f}{unit}" + (f" ± {half:,.{digits}f}" if len(values) > 1 else "")


def seeds_note(n_seeds: int) -> str:
    """What a table's cells are, for its note."""
    return f"{n_seeds} seeds, mean ± 95 % interval" if n_seeds > 1 else "one seed"


def evenly_spaced(n: int, most: int) -> np.ndarray:
    """At most `most` of the indices below n, from the first to the last, as int64.

    They are those of `torch.linspace(0, n - 1, m).long()`, which rounds a fused multiply-add to float32 and counts from
    the nearer end: draws of images that were made with it stay the same.
    """
    m = min(n, most)
    if m < 2:
        return np.zeros(m, np.int64)
    i = np.arange(m)
    step = float(np.float32(n - 1) / np.float32(m - 1))
    exact = np.where(i < m // 2, step * i, np.float32(n - 1) - step * (m - 1 - i))
    return exact.astype(np.float32).astype(np.int64)


def uniform(numbers: np.ndarray, seed: int) -> np.ndarray:
    """A number in [0, 1] for each number, as good as drawn at random, that depends on it and on the seed alone."""
    golden = 0x9E3779B97F4A7C15
    x = numbers.astype(np.uint64) * np.uint64(golden) + np.uint64((seed + 1) * golden**2 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finaliser of splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))).astype(np.float64) / 2.0**64
