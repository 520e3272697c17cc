import torch

from joynexus.models.chunks import FixedChunks


class Network:
    """Adds 1; from ``changes_at`` rows on, it rounds differently, as a kernel may."""

    def __init__(self, changes_at=None):
        self.sizes = []
        self.changes_at = changes_at

    def __call__(self, rows):
        (frames,) = rows
        self.sizes.append(len(frames))
        answer = frames.float() + 1
        if self.changes_at is not None and len(frames) >= self.changes_at:
            answer = answer * (1 + 1e-6)
        return (answer,)


def frames(rows):
    return torch.arange(rows, dtype=torch.uint8)[:, None].expand(rows, 3).contiguous()


def test_a_small_size_is_tried_once_and_then_used_where_it_rounds_as_a_full_chunk():
    network = Network()
    chunks = FixedChunks(network, 8)
    for _ in range(3):
        (answer,) = chunks.run((frames(2),))
        assert torch.equal(answer, frames(2).float() + 1)
    assert network.sizes == [8, 2, 2, 2, 2]
    assert chunks.num_forwards == 3


def test_rows_are_filled_up_where_small_sizes_round_differently():
    network = Network(changes_at=8)
    chunks = FixedChunks(network, 8)
    (together,) = chunks.run((frames(8),))
    (alone,) = chunks.run((frames(1),))
    assert torch.equal(alone[0], together[0])
    assert len(alone) == 1
    network.sizes.clear()
    chunks.run((frames(3),))
    assert network.sizes == [8]


def test_a_long_batch_is_split_and_keeps_its_order():
    network = Network()
    (answer,) = FixedChunks(network, 4).run((frames(10),))
    assert torch.equal(answer[:, 0], torch.arange(10) + 1.0)
    assert network.sizes == [4, 4, 4, 2, 2]
