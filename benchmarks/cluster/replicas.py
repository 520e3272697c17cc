"""What the serving benchmark deploys beside the service's own replicas: a bare deployment, and a replica to measure."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from joynexus.actors.inference import InferenceReplica
from joynexus.errors import JoyNexusError
from joynexus.specs.service import ServiceSpec
from joynexus.types import ActionChunk, PredictRequest

if TYPE_CHECKING:
    from joynexus.inference.engine import InferenceEngine
    from joynexus.inference.interruption import Urgent


def no_op_chunk(request: PredictRequest) -> ActionChunk:
    """Return a chunk of zeros of a size that policies have: 8 steps of 7 numbers a row."""
    return ActionChunk(actions=np.zeros((len(request.observation), 8, 7), dtype=np.float32), policy_version=0)


class Bare:
    """A Serve deployment that does nothing: what a handle call costs by itself, with the same request and answer."""

    async def predict(self, request: PredictRequest) -> ActionChunk:
        """Answer at once."""
        return no_op_chunk(request)


class _Switched:
    """The engine, with its versions and signatures, which can be told to do no work, or not to be interrupted."""

    def __init__(self, engine: "InferenceEngine") -> None:
        self._engine = engine
        self.works = True
        self.gives_way = True

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # the engine's own
        return getattr(self._engine, name)

    def predict(
        self, requests: Sequence[PredictRequest], urgent: "Urgent | None" = None
    ) -> list[ActionChunk | JoyNexusError]:
        """Act, or answer at once."""
        urgent = urgent if self.gives_way else None
        return self._engine.predict(requests, urgent) if self.works else [no_op_chunk(request) for request in requests]


class MeasuredReplica(InferenceReplica):
    """The product's replica, with its store, batcher and executor, around an engine that can be told to do nothing.

    It can also be asked what the engine does without callers.
    """

    @staticmethod
    def load_engine(spec: ServiceSpec, backbone: str) -> "InferenceEngine":
        """Load the product's engine, behind a switch."""
        return cast("InferenceEngine", _Switched(InferenceReplica.load_engine(spec, backbone)))

    async def switch(self, *, works: bool, gives_way: bool = True) -> None:
        """Let the engine do its work, or nothing; and let it be interrupted, or not."""
        engine = cast("_Switched", self._engine)
        engine.works, engine.gives_way = works, gives_way

    async def num_waiting(self) -> int:
        """Return how many requests wait."""
        return self._batcher.stats().queued_requests

    async def engine_rate(self, requests: list[PredictRequest]) -> float:
        """Run full batches in the replica's own process, one after the other, with nobody else asking.

        Args:
            requests: Of any tenants that are served here; cut into batches of ``max_batch_size`` rows of one row each.

        Returns:
            Rows per second of wall time.
        """
        for tenant in {each.tenant for each in requests}:
            if tenant not in self._engine.versions():
                await self._wait_for(tenant)
        size = self.max_batch_size
        batches = [requests[start : start + size] for start in range(0, len(requests), size)]

        def run() -> float:
            began = time.perf_counter()
            for batch in batches:
                for answer in self._engine.predict(batch):
                    if isinstance(answer, JoyNexusError):
                        raise answer
            return len(requests) / (time.perf_counter() - began)

        return await asyncio.to_thread(run)
