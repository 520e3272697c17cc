"""Training calls that arrive in any order are submitted in the order of their numbers."""

import asyncio
import random
import time
from concurrent.futures import Future

import pytest

from joynexus.actors.turns import Turns
from joynexus.errors import InvalidBatchError, SequenceConflictError
from joynexus.specs.algorithm import OptimizerSpec
from joynexus.types import TrainingCall, TrainingResult


class Slot:
    """A slot that accepts the next number alone, refuses some, and remembers what it took."""

    def __init__(self, *, bad: frozenset[int] = frozenset()) -> None:
        self.taken: list[float] = []
        self.bad = set(bad)

    def submit(self, call: TrainingCall) -> "Future[TrainingResult]":
        if call.sequence in self.bad:
            raise InvalidBatchError("shape.")
        if call.sequence != len(self.taken):
            raise SequenceConflictError(f"call {call.sequence} came before call {len(self.taken)}.")
        assert call.optimizer is not None
        self.taken.append(call.optimizer.lr)
        return Future()


async def take(turns: Turns, slot: Slot, sequence: int, *, delay_s: float = 0.0, lr: float | None = None) -> None:
    """Have a call arrive after a while."""
    await asyncio.sleep(delay_s)
    call = TrainingCall(tenant="a", sequence=sequence, optimizer=OptimizerSpec(lr=lr or (sequence + 1) / 1000))

    async def submit() -> "Future[TrainingResult] | None":
        return slot.submit(call)

    async def attempt() -> "Future[TrainingResult] | None":
        await asyncio.sleep(0.0)  # as a command to the compute thread
        return None if sequence > len(slot.taken) else slot.submit(call)

    await turns.take(call, attempt, submit)


@pytest.mark.parametrize("seed", range(5))
def test_calls_take_effect_in_order_whenever_they_arrive(seed: int) -> None:
    rng, slot = random.Random(seed), Slot()

    async def arrive() -> None:
        turns = Turns()
        await asyncio.gather(*[take(turns, slot, number, delay_s=rng.uniform(0.0, 0.05)) for number in range(20)])

    asyncio.run(arrive())
    assert slot.taken == [(number + 1) / 1000 for number in range(20)]


def test_nothing_behind_a_refused_call_takes_effect_until_its_number_is_used_again() -> None:
    slot = Slot(bad=frozenset({1}))

    async def arrive() -> list[object]:
        turns = Turns()
        first = await asyncio.gather(
            *[take(turns, slot, number, delay_s=0.03 - number / 100) for number in range(4)], return_exceptions=True
        )
        late = await asyncio.gather(take(turns, slot, 2), return_exceptions=True)
        slot.bad.clear()
        again = await asyncio.gather(*[take(turns, slot, number, lr=0.5) for number in (2, 1)], return_exceptions=True)
        return [*first, *late, *again]

    began = time.monotonic()
    outcomes = asyncio.run(arrive())
    assert time.monotonic() - began < 2.0  # nobody waited for what could not come
    kinds = [type(each) for each in outcomes]
    none, refused, behind = type(None), InvalidBatchError, SequenceConflictError
    assert kinds == [none, refused, behind, behind, behind, behind, none]
    assert "call 2 was made behind call 1, which was refused: shape." in str(outcomes[2])
    assert slot.taken == [0.001, 0.5]


def test_a_call_whose_predecessor_never_comes_is_refused_after_a_while() -> None:
    slot = Slot()
    with pytest.raises(SequenceConflictError, match="call 3 came before call 0"):
        asyncio.run(take(Turns(patience_s=0.1), slot, 3))


def test_a_closed_tenants_refusal_is_forgotten() -> None:
    async def arrive() -> list[float]:
        turns, old, new = Turns(), Slot(bad=frozenset({0})), Slot()
        with pytest.raises(InvalidBatchError):
            await take(turns, old, 0)
        turns.forget("a")
        await asyncio.gather(take(turns, new, 1), take(turns, new, 0))
        return new.taken

    assert asyncio.run(arrive()) == [0.001, 0.002]
