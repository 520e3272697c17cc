"""Callers → engine: requests of many tenants in one forward, the next batch filling while this one runs.

One task runs batch after batch; the engine computes in a thread of its own, so that the event loop goes on taking
requests. Nothing that one caller does reaches another: a request that fails fails alone, one whose caller gives up
is taken out before it is run, and a tenant with many requests gets its fair share of each batch, not more.

An idle engine waits for further requests only while that is expected to save more than it costs
(:mod:`joynexus.scheduling.batching`), and never for longer than ``max_wait_ms``. So a request waits at most for the
batch that runs when it comes, ``max_wait_ms``, and the batches that fairness puts before its own: none, where its
tenant has had less than its share. A batch of nothing but floods is put aside for it
(:mod:`joynexus.scheduling.preemption`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

from joynexus.errors import JoyNexusError, QueueClosedError, ServiceError, TenantFailedError, TenantNotFoundError
from joynexus.queues.batcher_stats import BatchBook, BatcherStats
from joynexus.queues.flood_control import FloodControl
from joynexus.queues.running_batch import Answer, Run, RunningBatch
from joynexus.queues.waiting_room import Pending, WaitingRoom
from joynexus.scheduling.batching import wait_until
from joynexus.scheduling.cost import Measured
from joynexus.scheduling.fairness import Priority
from joynexus.specs.service import InferenceSpec
from joynexus.types import ActionChunk, PredictRequest

log = logging.getLogger(__name__)

Because = Callable[[Literal["no_data", "waiting_for_group", "control"]], AbstractContextManager[None]]
"""Entered while the engine is idle, with the reason."""


class GroupBatcher:
    """Batches requests in front of an engine. Binds to the event loop of the first request."""

    def __init__(
        self,
        engine_run: Callable[[list[PredictRequest], RunningBatch | None], Sequence[Answer]],
        signature_of: Callable[[str], str],
        spec: InferenceSpec,
        *,
        executor: Executor | None = None,
        spent: Callable[[str], Measured] | None = None,
        because: Because | None = None,
    ) -> None:
        """Start idle.

        Args:
            engine_run: Answers a batch of one schema signature, one answer per request; runs in ``executor``. Where it
                is given a running batch, it asks that at its pauses whom to answer first.
            signature_of: A tenant's schema signature; raises ``TenantNotFoundError``.
            spec: Size of a batch, waiting time, bound of the queue.
            executor: Runs one batch at a time; None makes a thread for it.
            spent: What the engine has measured of a tenant so far, so that shares are of its seconds; None makes them
                shares of rows.
            because: Told why the engine is idle, while it is.
        """
        self._engine_run = engine_run
        self._signature_of = signature_of
        self._spec = spec
        self._own_executor = ThreadPoolExecutor(1, "inference") if executor is None else None
        self._executor = executor or self._own_executor
        self._room = WaitingRoom(spec.max_queued_rows, spent)
        self._because: Because = because or _untold
        self._floods = FloodControl(self._room, spec.max_batch_size)
        self._task: asyncio.Task[None] | None = None
        self._alarm: asyncio.Future[None] | None = None
        self._is_closed = False
        self._running: RunningBatch | None = None
        self._book = BatchBook()

    def set_share(self, tenant: str, weight: float, priority: Priority = "normal") -> None:
        """Give a tenant a weight and a class; without, it has weight 1 and class ``normal``."""
        self._room.set_share(tenant, weight, priority)

    def remove_tenant(self, tenant: str) -> None:
        """Forget a tenant's share; what waits for it is answered with ``TenantNotFoundError``."""
        self._floods.forget(tenant)
        for pending in self._room.forget(tenant):
            _fail(pending, TenantNotFoundError(f"tenant {tenant!r}: was removed while its request waited."))

    async def submit(self, request: PredictRequest) -> ActionChunk:
        """Act for some rows of one tenant, in a batch with whoever else asks.

        Args:
            request: Rows of one tenant. Larger ones than a batch are run alone.

        Returns:
            The engine's answer. If the caller is cancelled first, the request is not run.

        Raises:
            BackPressureError: If too many rows wait.
            TenantNotFoundError: If the tenant is not served here.
            InvalidBatchError: If the request could never be queued.
            QueueClosedError: If the batcher is closed, before or while the request waits.
            JoyNexusError: What the engine answers.
        """
        if self._is_closed:
            raise QueueClosedError("inference queue: is closed. Ask another replica.")
        loop = asyncio.get_running_loop()
        pending = Pending(
            request=request,
            tenant=request.tenant,
            signature=self._signature(request.tenant),
            rows=len(request.observation),
            queued_at=loop.time(),
            answer=loop.create_future(),
        )
        try:
            self._room.add(pending)
        except JoyNexusError:
            self._book.refused += 1
            raise
        arrivals = self._floods.learnt(pending.signature).arrivals
        arrivals.enter(request.tenant, pending.queued_at, pending.rows)
        self._ensure_running(loop)
        self._wake()
        if self._running is not None and request.tenant not in self._running.tenants:
            self._running.offer(self._floods.take_urgent(self._running, loop.time()))
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self._book.cancelled += not pending.is_taken
            raise
        finally:
            arrivals.leave(request.tenant, loop.time())
            self._room.discard(pending)

    def stats(self) -> BatcherStats:
        """Describe what was done so far."""
        return self._book.stats(queued_requests=len(self._room), queued_rows=self._room.num_rows)

    async def aclose(self) -> None:
        """Answer what waits with ``QueueClosedError``, finish the batch that runs, and stop."""
        self._is_closed = True
        self._abandon(list(self._room))
        self._wake()
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._own_executor is not None:
            self._own_executor.shutdown(wait=False)

    def _signature(self, tenant: str) -> str:
        try:
            return self._signature_of(tenant)
        except JoyNexusError:
            raise
        except Exception as error:  # a tenant's fault must not look like the service's
            raise TenantFailedError(f"tenant {tenant!r}: has no signature: {type(error).__name__}: {error}") from error

    def _ensure_running(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run(loop), name="inference batches")
            self._task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Leave nobody waiting, however the task ended; the next request starts another."""
        if not task.cancelled() and task.exception() is not None:
            log.error("inference queue: stopped", exc_info=task.exception())
        self._abandon(list(self._room))

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        free_at = loop.time()
        while not self._is_closed:
            signature = self._room.next_signature(loop.time())
            if signature is None:
                with self._because("no_data"):
                    await self._sleep(loop, None)
                self._book.no_data_s += loop.time() - free_at
                free_at = loop.time()
                continue
            await self._fill(loop, signature, free_at)
            now = loop.time()
            batch = self._room.take(
                signature, self._spec.max_batch_size, now, surplus=self._floods.surplus(signature, now)
            )
            while batch:
                with self._because("control"):  # but for what the engine itself counts as its work
                    batch = await self._execute(loop, batch)
                free_at = loop.time()
                await asyncio.sleep(0)  # whoever asks again at once is in the next choice, and not behind it

    async def _fill(self, loop: asyncio.AbstractEventLoop, signature: str, free_at: float) -> None:
        """Wait for further requests while that is worth it; the engine is idle meanwhile."""
        if not self._may_pay(signature):
            return
        began = loop.time()
        bound = max(self._room.oldest(signature), free_at) + self._spec.max_wait_ms / 1000
        while not self._is_closed and (until := self._wait_until(signature, bound, loop.time())) > loop.time():
            with self._because("waiting_for_group"):
                await self._sleep(loop, until)
        self._book.group_s += loop.time() - began

    def _may_pay(self, signature: str) -> bool:
        """Whether company could save anything: a cheap question, so that callers are rarely looked at one by one."""
        forward = self._floods.learnt(signature).forward
        is_full = self._room.rows_of(signature) >= self._spec.max_batch_size
        return not is_full and forward.may_gain(self._room.requests_of(signature), self._spec.device_second_worth)

    def _wait_until(self, signature: str, bound: float, now: float) -> float:
        if now >= bound or not self._may_pay(signature):
            return now
        learnt = self._floods.learnt(signature)
        return wait_until(
            now,
            bound=bound,
            waiting=self._room.num_requests,
            sharing=self._room.requests_of(signature),
            room=self._spec.max_batch_size - self._room.rows_of(signature),
            expected=learnt.arrivals.expected(now, bound),
            cost=learnt.forward,
            worth=self._spec.device_second_worth,
        )

    async def _execute(self, loop: asyncio.AbstractEventLoop, batch: list[Pending]) -> list[Pending]:
        """Run a batch, and answer it; returns what it was to be put aside for and was not any more."""
        running = RunningBatch(
            batch,
            floods=frozenset(each.tenant for each in batch if each.tenant in self._room.rows_by_tenant),
            clock=loop.time,
            deliver=partial(loop.call_soon_threadsafe, self._after_aside),
        )
        urgent = running if running.gives_way else None
        self._running = running
        requests = [each.request for each in batch]
        try:
            answers = await loop.run_in_executor(self._executor, self._engine_run, requests, urgent)
            if len(answers) != len(batch):
                raise ServiceError(f"inference engine: gave {len(answers)} answers to {len(batch)} requests.")  # noqa: TRY301
        except asyncio.CancelledError:
            self._abandon(running.abandoned())
            raise
        except Exception as error:
            log.exception("a batch of %d requests failed", len(batch))
            answers = [_typed(error) for _ in batch]
        finally:
            self._running = None
        self._finish(running.end(answers), is_aside=False)
        return running.close()

    def _after_aside(self, run: Run) -> None:
        """Answer requests that were run in the middle of a batch, and see who has come meanwhile."""
        self._finish(run, is_aside=True)
        if self._running is not None:
            self._running.offer(self._floods.take_urgent(self._running, run.ended))

    def _finish(self, run: Run, *, is_aside: bool) -> None:
        """Learn from a run, and answer its requests."""
        self._book.note(run, is_aside=is_aside)
        self._floods.finished(run)
        self._room.settle({each.tenant for each in run.batch})
        for pending, answer in zip(run.batch, run.answers, strict=True):
            if isinstance(answer, Exception):
                _fail(pending, answer)
            elif not pending.answer.done():
                pending.answer.set_result(answer)

    def _abandon(self, requests: list[Pending]) -> None:
        for pending in requests:
            self._room.discard(pending)
            _fail(pending, QueueClosedError("inference queue: stopped. Try again, or ask another replica."))

    async def _sleep(self, loop: asyncio.AbstractEventLoop, until: float | None) -> None:
        """Wait for the next request, at most ``until``."""
        self._alarm = loop.create_future()
        timer = None if until is None else loop.call_at(until, self._wake)
        try:
            await self._alarm
        finally:
            self._alarm = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._alarm is not None and not self._alarm.done():
            self._alarm.set_result(None)


def _untold(reason: Literal["no_data", "waiting_for_group", "control"]) -> AbstractContextManager[None]:
    del reason
    return nullcontext()


def _fail(pending: Pending, error: Exception) -> None:
    if not pending.answer.done():
        pending.answer.set_exception(error)


def _typed(error: Exception) -> JoyNexusError:
    """A typed error of its own for each request: one instance raised in many tasks would mix their tracebacks."""
    if isinstance(error, JoyNexusError):
        return type(error)(*error.args)
    return ServiceError(f"inference engine: the batch failed: {type(error).__name__}: {error}. Try again.")
