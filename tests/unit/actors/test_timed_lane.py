import threading

import numpy as np
import pytest

from joynexus.actors.timed_lane import TimedLane
from joynexus.scheduling.shipping import MIN_PUTS, FeatureShipping
from joynexus.types import NEVER_STALE, LaneItem, Observation, TrainingBatch


class FakeQueue:
    """Takes 1 ms for a call, and for each byte what it is told to."""

    def __init__(self, seconds_per_byte):
        self.seconds_per_byte = seconds_per_byte
        self.now = 0.0
        self.items = []

    def clock(self):
        return self.now

    def put(self, item, stop):
        assert not stop.is_set()
        self.now += 1e-3 + self.seconds_per_byte * item.nbytes
        self.items.append(item)
        return "ok"

    def waiting(self, tenant):
        assert tenant == "a"
        self.now += 1e-3
        return len(self.items)


def item(ordinal):
    batch = TrainingBatch(
        observation=Observation(
            images=np.zeros((2, 1, 100, 100, 3), dtype=np.uint8),
            image_mask=np.ones((2, 1), dtype=np.bool_),
            state=np.zeros((2, 3), dtype=np.float32),
            instructions=("go",) * 2,
        ),
        actions=np.zeros((2, 4, 1), dtype=np.float32),
        action_is_pad=np.zeros((2, 4), dtype=np.bool_),
        sample_ids=("0", "1"),
    )
    return LaneItem(
        item_id=str(ordinal), tenant="a", workload=0, ordinal=ordinal, policy_version=NEVER_STALE, payload=batch
    )


@pytest.mark.parametrize(("seconds_per_byte", "reason"), [(1e-9, "cheaper"), (1e-6, "dearer")])
def test_the_time_that_bytes_take_decides(seconds_per_byte, reason):
    queue, shipping = FakeQueue(seconds_per_byte), FeatureShipping("auto", max_bytes=1 << 20)
    lane = TimedLane(queue, shipping, clock=queue.clock)
    shipping.note_answer(rows=1, feature_bytes=50_000, frame_bytes=30_000, encode_seconds=1e-3)
    for ordinal in range(MIN_PUTS):
        assert lane.waiting("a") == ordinal
        lane.put(item(ordinal), threading.Event())
    assert shipping.rates.seconds_per_byte == pytest.approx(seconds_per_byte)
    assert shipping.reason == reason
    assert [each.ordinal for each in queue.items] == list(range(MIN_PUTS))
