"""Whether prefix features travel with trajectories. Pure: the caller measures, and brings the seconds.

Features that a replica has computed to act are those that the trainer needs to learn. Sent along, they take
``NUM_HOPS`` hops, and the frames that they make needless stay out of the last ``NUM_FRAME_HOPS``:

    replica --features--> worker --features, no frames--> lane --features, no frames--> trainer

They travel where that takes less time than encoding again. A worker times its puts into the lane against calls that
carry nothing; the replica tells what encoding a row costs it. All of this is known whatever is decided, so that a
decision can be taken back when the rates change.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal

ShippingMode = Literal["auto", "always", "never"]
NUM_HOPS = 3
"""Between processes that features take, from the replica to the trainer."""
NUM_FRAME_HOPS = 2
"""Of them, those that frames would take in their place: the replica gets its frames in either case."""
WINDOW = 32
"""Newest timings that count; their median is not moved by a pause of the machine."""
MIN_PUTS = 3
"""Puts that are timed before the first decision; features travel until then, or their size would stay unknown."""
MARGIN = 1.25
"""A decision is taken back only where the other one is better by this factor, so that noise does not turn it."""
MAX_TOO_LARGE = 3
"""Episodes in a row whose features were too large, after which they are no longer asked for."""
LANE_SHARE = 0.5
"""Part of a lane's bytes that features may take when as many trajectories wait as ever do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippingRates:
    """What is measured."""

    feature_bytes: float
    """Of one row's features."""
    frame_bytes: float
    """Of one row's frames."""
    seconds_per_byte: float
    """Of one hop, beyond what a call takes that carries nothing."""
    encode_seconds: float
    """Of one row, on the replica's device."""

    @property
    def transport_seconds(self) -> float:
        """Time that one row's features take more than its frames; 0 where they are the smaller ones."""
        extra_bytes = NUM_HOPS * self.feature_bytes - NUM_FRAME_HOPS * self.frame_bytes
        return max(extra_bytes, 0.0) * self.seconds_per_byte


def is_worth_shipping(rates: ShippingRates, *, is_shipping: bool | None) -> bool:
    """Decide whether features travel.

    Args:
        rates: As measured.
        is_shipping: What was decided last, and holds unless it is clearly worse; None before the first decision.

    Returns:
        Whether transport takes less time than encoding again.
    """
    factor = {None: 1.0, True: 1 / MARGIN, False: MARGIN}[is_shipping]
    return factor * rates.transport_seconds < rates.encode_seconds


def max_feature_bytes(lane_bytes: int, num_waiting: int) -> int:
    """Return the bytes of features that one trajectory may have, so that features alone never fill a lane.

    Args:
        lane_bytes: Bound of the lane.
        num_waiting: Trajectories that may wait in it before its workers pause.
    """
    return int(LANE_SHARE * lane_bytes / max(num_waiting, 1))


class FeatureShipping:
    """Measures, and decides anew with every trajectory. One per worker and workload; used by one thread."""

    def __init__(self, mode: ShippingMode, *, max_bytes: int) -> None:
        """Begin to measure.

        Args:
            mode: ``auto`` decides by rates; ``always`` and ``never`` do not, but the bound holds for ``always`` too.
            max_bytes: Features of one trajectory at most; see :func:`max_feature_bytes`.
        """
        self._mode: ShippingMode = mode
        self._max_bytes = max_bytes
        self._is_shipping: bool | None = None
        self._too_large_in_a_row = 0
        self._feature_bytes = 0.0
        self._frame_bytes = 0.0
        self._encode_seconds = 0.0
        self._empty_calls: deque[float] = deque(maxlen=WINDOW)
        self._puts: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.num_shipped = 0
        """Trajectories that took their features along."""
        self.num_trajectories = 0

    # ---- what is measured

    def note_answer(self, *, rows: int, feature_bytes: int, frame_bytes: int, encode_seconds: float) -> None:
        """Note an answer of a replica.

        Args:
            rows: In it.
            feature_bytes: Of their features together; 0 where none were asked for.
            frame_bytes: Of the frames that were asked about.
            encode_seconds: Of one row, as the replica says; 0 where it does not know.
        """
        if feature_bytes:
            self._feature_bytes = feature_bytes / rows
        self._frame_bytes = frame_bytes / rows
        self._encode_seconds = encode_seconds or self._encode_seconds

    def note_empty_call(self, seconds: float) -> None:
        """Note how long a call to the queue took that carried nothing."""
        self._empty_calls.append(seconds)

    def note_put(self, nbytes: int, seconds: float) -> None:
        """Note how long a trajectory took into the lane, and decide anew."""
        self._puts.append((max(nbytes, 1), seconds))
        rates = self.rates
        if rates is not None:
            self._is_shipping = is_worth_shipping(rates, is_shipping=self._is_shipping)

    @property
    def rates(self) -> ShippingRates | None:
        """What is measured so far; None before there is enough of it."""
        if len(self._puts) < MIN_PUTS or not self._feature_bytes or not self._encode_seconds:
            return None
        base = median(self._empty_calls) if self._empty_calls else 0.0
        per_byte = median(max(seconds - base, 0.0) / nbytes for nbytes, seconds in self._puts)
        return ShippingRates(
            feature_bytes=self._feature_bytes,
            frame_bytes=self._frame_bytes,
            seconds_per_byte=per_byte,
            encode_seconds=self._encode_seconds,
        )

    # ---- what is decided

    @property
    def wants_features(self) -> bool:
        """Whether to ask the replica for features."""
        return self.reason in ("always", "measuring", "cheaper")

    @property
    def reason(self) -> str:
        """Why features travel: ``always``, ``measuring``, ``cheaper``; or not: ``never``, ``dearer``, ``too large``."""
        if self._mode == "never":
            return "never"
        if self._too_large_in_a_row >= MAX_TOO_LARGE:
            return "too large"
        if self._mode == "always":
            return "always"
        return {None: "measuring", True: "cheaper", False: "dearer"}[self._is_shipping]

    def fits(self, *, feature_bytes: int, frame_bytes: int) -> bool:
        """Tell whether an episode may keep its features; where not, that is noted, and the caller drops them.

        Args:
            feature_bytes: Of its decisions so far.
            frame_bytes: Of the frames that would stay behind: features that are no larger never fill a lane.
        """
        if feature_bytes <= max(self._max_bytes, frame_bytes):
            return True
        self._too_large_in_a_row += 1
        return False

    def note_trajectory(self, *, is_shipped: bool) -> None:
        """Count a trajectory, and whether it took its features along."""
        self.num_trajectories += 1
        if is_shipped:
            self.num_shipped += 1
            self._too_large_in_a_row = 0

    def report(self) -> dict[str, float | str | None]:
        """Return the decision and its rates as plain values; None where a rate is not known yet."""
        rates = self.rates
        return {
            "reason": self.reason,
            "shipped": self.num_shipped,
            "trajectories": self.num_trajectories,
            "feature_bytes": self._feature_bytes,
            "frame_bytes": self._frame_bytes,
            "bytes_per_second": 1 / rates.seconds_per_byte if rates and rates.seconds_per_byte else None,
            "transport_seconds": rates.transport_seconds if rates else None,
            "encode_seconds": self._encode_seconds or None,
        }
