"""However many rows come together, a backbone sees few shapes: kernels are chosen, tuned or captured once for each."""

import torch

from joynexus.models.chunks import FixedChunks


def test_any_number_of_rows_runs_in_no_more_shapes_than_a_chunk_has_rows():
    seen: set[int] = set()

    def forward(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.add(len(rows[0]))
        return (rows[0] * 2,)

    chunks = FixedChunks(forward, 16)
    for rows in range(1, 100):
        chunks.run((torch.zeros(rows, 3),))
    assert seen <= set(range(1, 17))
