import torch

from joynexus.models.chunks import CPU_TOKENS, FixedChunks, rows_that_pay


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


def test_a_size_between_powers_of_two_is_used_where_the_power_below_is_equal():
    network = Network()
    chunks = FixedChunks(network, 8)
    for _ in range(2):
        (answer,) = chunks.run((frames(5),))
        assert torch.equal(answer, frames(5).float() + 1)
    assert network.sizes == [8, 4, 8, 5, 5, 5]


def test_a_bound_on_the_rows_makes_chunks_smaller_and_keeps_their_numbers():
    network = Network(changes_at=4)
    chunks = FixedChunks(network, 8)
    (answer,) = chunks.run((frames(6),), max_rows=4)
    assert network.sizes == [4, 4, 2, 4]
    assert torch.equal(answer[:1], chunks.run((frames(1),), max_rows=4)[0])
    network.sizes.clear()
    chunks.run((frames(8),), max_rows=16)
    assert network.sizes == [8]


def test_rows_that_pay_are_a_power_of_two_within_the_bound_on_a_cpu_alone():
    cpu = torch.device("cpu")
    for length in (1, 16, 100, 176, 512, 1024, 5000):
        rows = rows_that_pay(length, cpu)
        assert rows is not None
        assert rows & (rows - 1) == 0
        assert rows == 1 or rows * length <= CPU_TOKENS < 2 * rows * length
    assert rows_that_pay(176, torch.device("cuda")) is None
