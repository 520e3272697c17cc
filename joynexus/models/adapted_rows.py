"""Rows of many tenants, each with its own adapter or none, in one forward of the shared backbone.

The weights are gathered by row, so that the change of row i is s ``bmm(bmm(x, A[i]ᵀ), B[i]ᵀ)``: nothing is summed over
rows. A row's numbers are those that it would have alone, and so is its gradient, which is kept by row and summed over
a tenant's rows only once they are together again. Rows without an adapter keep their ``W x``: it is selected, and not
computed anew.

    rows = AdaptedRows([a, a, None, b], records=True)
    with rows.active():
        features = backbone.prefix(batch, signature)     # FixedChunks cuts the rows, and calls rows.chunk for each part
    rows.backward(outputs, gradients)                    # one backward for all
    rows.gradient(0, 2)                                  # of tenant a, by the names of its parameters
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from joynexus.models.adapters import ACTIVE, Adapter, Kind, activated


class _Stack:
    """The adapters of one kind in a chunk, gathered by row; 0 where a row has none, or one of another kind."""

    def __init__(self, kind: Kind, rows: Sequence[Adapter | None], *, records: bool) -> None:
        own = [row if row is not None and row.kind == kind else None for row in rows]
        like = next(row for row in own if row is not None)
        self.kind = kind
        device = next(iter(like.a.values())).device
        self.a = {path: _gather([row and row.a[path] for row in own], records) for path in like.a}
        self.b = {path: _gather([row and row.b[path] for row in own], records) for path in like.b}
        self.gradients: dict[str, Tensor] = {}
        """Of A and B, by row, by the name of the parameter; after the backward."""
        self._scale = torch.tensor([row.spec.scale if row else 0.0 for row in own], device=device)[:, None, None]
        self._own = None if all(own) else torch.tensor([row is not None for row in own], device=device)

    def named_leaves(self) -> dict[str, Tensor]:
        """Return A and B of all rows by the names of the parameters that they were gathered from."""
        named: dict[str, Tensor] = {}
        for path in self.a:
            named |= {f"{path}.lora_A.weight": self.a[path], f"{path}.lora_B.weight": self.b[path]}
        return named

    def change(self, path: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return a layer's output with the changes of these rows; the others' are selected, to the last bit."""
        if path not in self.a:
            return output
        a, b = self.a[path], self.b[path]
        rows = inputs.reshape(len(a), -1, inputs.shape[-1]).to(a.dtype)
        change = torch.bmm(torch.bmm(rows, a.transpose(1, 2)), b.transpose(1, 2)) * self._scale
        changed = (output + change.view(output.shape)).to(output.dtype)
        if self._own is None:
            return changed
        return torch.where(self._own.view(-1, *[1] * (output.ndim - 1)), changed, output)


class AdaptedRows:
    """Which adapter each row of a batch has on its way through the backbone. For one forward, in one thread."""

    def __init__(self, rows: Sequence[Adapter | None], *, records: bool = False) -> None:
        """Name the rows' adapters.

        Args:
            rows: One entry per row.
            records: Whether to keep the graph, so that :meth:`backward` can follow.
        """
        self.records = records
        self._rows = list(rows)
        self._stacks: list[_Stack] | None = None
        """Of the chunk that runs; None where a backbone runs all rows at once."""
        self._recorded: list[tuple[int, int, list[_Stack]]] = []
        """First row, number of rows, and weights of each chunk."""

    @contextmanager
    def active(self) -> Generator[None]:
        """Change the layers' outputs in this thread."""
        with activated(self):
            yield

    @contextmanager
    def chunk(self, start: int, count: int, size: int) -> Generator[None]:
        """Change the outputs of ``size`` rows: ``count`` rows from ``start`` on, filled up with copies of the first."""
        rows = self._rows[start : start + count]
        self._stacks = self._gathered(start, rows + rows[:1] * (size - count), count)
        try:
            yield
        finally:
            self._stacks = None

    def kinds(self, start: int, count: int) -> list[Adapter]:
        """Return one adapter of every kind in some rows."""
        found = {row.kind: row for row in self._rows[start : start + count] if row is not None}
        return list(found.values())

    def change(self, path: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return a layer's output with the changes of all rows."""
        stacks = self._stacks
        if stacks is None:
            stacks = self._stacks = self._gathered(0, self._rows, len(self._rows))
        for stack in stacks:
            output = stack.change(path, inputs, output)
        return output

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compute the gradient of every row's A and B.

        Args:
            outputs: What the forward answered, of all rows; none where no loss reads any of it.
            gradients: Of the outputs; 0 for rows that have none.
        """
        stacks = [stack for _, _, each in self._recorded for stack in each]
        leaves = [leaf for stack in stacks for leaf in stack.named_leaves().values()]
        if not outputs:
            for stack in stacks:
                stack.gradients = {name: torch.zeros_like(leaf) for name, leaf in stack.named_leaves().items()}
            return
        found = iter(torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, materialize_grads=True))
        for stack in stacks:
            stack.gradients = {name: next(found) for name in stack.named_leaves()}

    def gradient(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the gradient of the adapter that rows ``start`` to ``stop - 1`` share, summed over them.

        The rows are put together before they are summed: how they were cut into chunks, and beside whom, does not show.
        """
        adapter = self._rows[start]
        assert adapter is not None
        parts: dict[str, list[Tensor]] = {name: [] for name in adapter.named_parameters()}
        for first, count, stacks in self._recorded:
            rows = slice(max(start - first, 0), min(stop - first, count))
            if rows.start < rows.stop:
                stack = next(each for each in stacks if each.kind == adapter.kind)
                for name, found in parts.items():
                    found.append(stack.gradients[name][rows])
        return {name: torch.cat(found).sum(dim=0) for name, found in parts.items()}

    def row_gradients(self) -> list[Tensor]:
        """Return all that :meth:`backward` came to, chunk by chunk; the first axis is the row."""
        return [each for _, _, stacks in self._recorded for stack in stacks for each in stack.gradients.values()]

    def _gathered(self, start: int, rows: Sequence[Adapter | None], count: int) -> list[_Stack]:
        kinds = {row.kind: None for row in rows if row is not None}
        stacks = [_Stack(kind, rows, records=self.records) for kind in kinds]
        if self.records:
            self._recorded.append((start, count, stacks))
        return stacks


def adapted_rows() -> AdaptedRows | None:
    """Return whose rows are on their way through the backbone in this thread; None where all are the backbone's own."""
    return ACTIVE.changes if isinstance(ACTIVE.changes, AdaptedRows) else None


def rounds_alike(
    forward: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
    rows: tuple[Tensor, ...],
    size: int,
    like: Adapter,
    *,
    records: bool,
) -> bool:
    """Try whether the first ``size`` rows by themselves give the numbers that they have among all ``rows``.

    Args:
        forward: Runs rows.
        rows: Of a full chunk.
        size: Of a smaller one.
        like: An adapter of the kind to try.
        records: Whether the gradients have to be equal too.
    """
    adapter = like.randomized(size)
    large = _trial(forward, rows, adapter, records=records)
    small = _trial(forward, tuple(each[:size] for each in rows), adapter, records=records)
    return all(torch.equal(one[:size], other) for one, other in zip(large, small, strict=True))


def _trial(
    forward: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
    rows: tuple[Tensor, ...],
    adapter: Adapter,
    *,
    records: bool,
) -> list[Tensor]:
    """Run rows that all have one adapter; return the answers and, if asked for, each row's gradients."""
    count = len(rows[0])
    adapted = AdaptedRows([adapter] * count, records=records)
    with adapted.active(), adapted.chunk(0, count, count), torch.set_grad_enabled(records):
        answers = forward(rows)
    found = [each.detach() for each in answers]
    if records:
        outputs = [each for each in answers if each.requires_grad]
        adapted.backward(outputs, [each.detach() for each in outputs])
        found += adapted.row_gradients()
    return found


def _gather(rows: Sequence[Tensor | None], records: bool) -> Float[Tensor, "b *shape"]:  # noqa: FBT001
    """Put the weights of rows together; 0 where a row has none: even NaN in another's must not reach its gradient."""
    zero = torch.zeros_like(next(row for row in rows if row is not None))
    return torch.stack([zero if row is None else row.detach() for row in rows]).requires_grad_(records)
