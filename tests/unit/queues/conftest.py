"""An event loop whose clock jumps to the next timer: hours of waiting pass in milliseconds, and in the same order."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from joynexus.types import NEVER_STALE, LaneItem, Observation, TrainingBatch


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None):
        if timeout is not None and timeout > 0:
            self.now += timeout
            timeout = 0
        return super().select(timeout)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


@pytest.fixture(scope="session")
def make_loop():
    return VirtualLoop


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    loop.close()


@pytest.fixture
def run(loop: VirtualLoop) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    def run_until_done(main: Coroutine[Any, Any, Any]) -> Any:
        async def leave_nothing_behind() -> Any:
            result = await main
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            return result

        return loop.run_until_complete(leave_nothing_behind())

    return run_until_done


def make_observation(rows: int = 1, state: float = 0.0) -> Observation:
    return Observation(
        images=np.zeros((rows, 0, 1, 1, 3), dtype=np.uint8),
        image_mask=np.zeros((rows, 0), dtype=np.bool_),
        state=np.full((rows, 1), state, dtype=np.float32),
        instructions=("go",) * rows,
    )


@pytest.fixture
def observe():
    return make_observation


@pytest.fixture(scope="session")
def make_item():
    """Items of 8 bytes a sample; from a dataset unless they have a version."""

    def make(
        tenant: str,
        ordinal: int = 0,
        *,
        rows: int = 1,
        version: int | None = None,
        workload: int = 0,
        item_id: str | None = None,
    ) -> LaneItem:
        batch = TrainingBatch(
            observation=make_observation(rows),
            actions=np.zeros((rows, 1, 1), dtype=np.float32),
            action_is_pad=np.zeros((rows, 1), dtype=np.bool_),
            sample_ids=(f"{tenant}/{ordinal}",) * rows,
        )
        return LaneItem(
            item_id=item_id or f"{tenant}/{workload}/{ordinal}",
            tenant=tenant,
            workload=workload,
            ordinal=ordinal,
            policy_version=NEVER_STALE if version is None else version,
            payload=batch,
        )

    return make
