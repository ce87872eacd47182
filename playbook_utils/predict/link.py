"""A connection between two ranks: a latency and a bandwidth, and both from measured points.

Hockney's model (Hockney 1994, "The communication challenge for MPP", Parallel Computing 20): a
message of n bytes takes alpha + beta n seconds, alpha being the latency and 1 / beta the bandwidth.

    link = fit_link([(8, 21e-6), (65_536, 55e-6), (1_048_576, 560e-6)])
    link.latency_s, link.bytes_per_s, link.message_s(25e6)

Left out: the change of protocol that real libraries make at some size, contention with other
messages, and the time of the sender's processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Link", "fit_link"]


@dataclass(frozen=True)
class Link:
    """What one message costs: latency_s + bytes / bytes_per_s.

    Raises:
        ValueError: a negative latency, a bandwidth that is not positive.
    """

    latency_s: float
    """alpha: seconds for a message of no bytes."""
    bytes_per_s: float
    """1 / beta: what each further byte is divided by; infinity where bytes cost nothing."""

    def __post_init__(self) -> None:
        if not self.latency_s >= 0:
            raise ValueError(f"latency_s is {self.latency_s}: expected 0 or more seconds")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}: expected more than 0")

    def message_s(self, nbytes: float) -> float:
        """Seconds that one message of `nbytes` takes."""
        if not nbytes >= 0:
            raise ValueError(f"nbytes is {nbytes}: expected 0 or more")
        return self.latency_s + nbytes / self.bytes_per_s

    @property
    def half_bytes(self) -> float:
        """The message that gets half of the bandwidth, Hockney's n_1/2: latency x bandwidth."""
        return self.latency_s * self.bytes_per_s


def fit_link(points: Iterable[tuple[float, float]]) -> Link:
    """The link whose times come closest to the measured (bytes, seconds).

    Least squares of the relative error, so that the short messages, from which the latency is
    read, count as much as the long ones. Where the best latency or the best cost of a byte would
    be negative it is 0, and the other is fitted alone.

    Raises:
        ValueError: fewer than two sizes, negative bytes, times that are not positive.
    """
    measured = [(float(nbytes), float(seconds)) for nbytes, seconds in points]
    if len({nbytes for nbytes, _ in measured}) < 2:
        raise ValueError(f"{len(measured)} points: expected at least two different sizes")
    for nbytes, seconds in measured:
        if not nbytes >= 0 or not 0 < seconds < math.inf:
            raise ValueError(f"({nbytes}, {seconds}): expected bytes >= 0 and seconds > 0")
    # Minimise sum((alpha + beta n - t)^2 / t^2): a 2 x 2 linear system in alpha and beta.
    s1 = math.fsum(1 / t**2 for _, t in measured)
    sn = math.fsum(n / t**2 for n, t in measured)
    snn = math.fsum(n * n / t**2 for n, t in measured)
    st = math.fsum(1 / t for _, t in measured)
    snt = math.fsum(n / t for n, t in measured)
    determinant = s1 * snn - sn * sn
    alpha = (st * snn - snt * sn) / determinant
    beta = (s1 * snt - sn * st) / determinant
    if beta <= 0:
        return Link(st / s1, math.inf)
    if alpha < 0:
        return Link(0.0, snn / snt)
    return Link(alpha, 1 / beta)
