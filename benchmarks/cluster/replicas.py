"""Replicas that the serving benchmark deploys beside the service's own: the product's, with one part replaced."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from joynexus.actors.inference import InferenceReplica
from joynexus.errors import JoyNexusError
from joynexus.inference.engine import InferenceEngine
from joynexus.models.backbone import load_backbone
from joynexus.specs.service import ServiceSpec
from joynexus.types import ActionChunk, PredictRequest


def no_op_chunk(request: PredictRequest) -> ActionChunk:
    """Return a chunk of zeros of a size that policies have: 8 steps of 7 numbers a row."""
    return ActionChunk(actions=np.zeros((len(request.observation), 8, 7), dtype=np.float32), policy_version=0)


class Bare:
    """A Serve deployment that does nothing: what a handle call costs by itself, with the same request and answer."""

    async def predict(self, request: PredictRequest) -> ActionChunk:
        """Answer at once."""
        return no_op_chunk(request)


class _NoOpEngine(InferenceEngine):
    """The engine with its versions and signatures, but without its work."""

    def predict(self, requests: Sequence[PredictRequest]) -> list[ActionChunk | JoyNexusError]:
        """Answer at once."""
        return [no_op_chunk(request) for request in requests]


class NoOpReplica(InferenceReplica):
    """The product's replica, with its store, batcher and executor, around an engine that does nothing."""

    @staticmethod
    def load_engine(spec: ServiceSpec, backbone: str) -> InferenceEngine:
        """Load the engine that does nothing."""
        return _NoOpEngine(load_backbone(spec.backbones[backbone]), spec.inference, backbone_name=backbone)


class MeasuredReplica(InferenceReplica):
    """The product's replica, which can also be asked what its engine does without callers."""

    async def engine_rate(self, requests: list[PredictRequest], rounds: int) -> float:
        """Run full batches in the replica's own process, one after the other, with nobody else asking.

        Args:
            requests: Of any tenants that are served here; cut into batches of ``max_batch_size`` rows of one row each.
            rounds: How often.

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
            for _ in range(rounds):
                for batch in batches:
                    for answer in self._engine.predict(batch):
                        if isinstance(answer, JoyNexusError):
                            raise answer
            return rounds * len(requests) / (time.perf_counter() - began)

        return await asyncio.to_thread(run)
