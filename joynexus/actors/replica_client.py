"""How a worker reaches the replicas, across their restarts."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError as ServeBackPressureError
from ray.serve.exceptions import RayServeException

from joynexus.actors import names
from joynexus.actors.roles import GONE, first_line, unwrap
from joynexus.errors import BackPressureError, RequestCancelledError, ServiceError
from joynexus.types import ActionChunk, PredictRequest

Answer = TypeVar("Answer")
LOOK_S = 1.0
"""How often a request that waits for its answer looks whether it is still wanted."""
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 2.0


class ReplicaClient:
    """A :class:`joynexus.rollout.collector.PolicyClient` over the Serve handle of a backbone.

    A prediction changes nothing, so it is simply made again when its replica died or was full.
    """

    def __init__(
        self,
        service: str,
        backbone: str,
        *,
        patience_s: float = 60.0,
        timeout_s: float = 60.0,
        stop: threading.Event | None = None,
    ) -> None:
        """Make a client.

        Args:
            service: The service.
            backbone: Whose replicas to ask.
            patience_s: How long to ask again.
            timeout_s: How long one request may take.
            stop: Ends the waiting when it is set: nobody wants the answer any more.
        """
        self._application = names.application(service, backbone)
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._stop = stop or threading.Event()
        self._handle: Any = None

    def predict(self, request: PredictRequest) -> ActionChunk:
        """Ask the replicas for action chunks.

        Raises:
            JoyNexusError: What the replica refused the request for.
            ServiceError: If no replica answered within the client's patience.
            RequestCancelledError: If ``stop`` was set before one did.
        """
        return _persist(lambda: self._once(request), self._patience_s, self._stop, f"{request.tenant}: predict")

    def _once(self, request: PredictRequest) -> ActionChunk:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(names.DEPLOYMENT, self._application)
        response = self._handle.predict.remote(request)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return response.result(timeout_s=LOOK_S)
            except TimeoutError:
                if self._stop.is_set() or time.monotonic() > deadline:
                    response.cancel()
                    raise


def _persist(call: Callable[[], Answer], patience_s: float, stop: threading.Event, what: str) -> Answer:
    """Repeat a call while its replica is dead, restarting or full, with growing delays."""
    deadline = time.monotonic() + patience_s
    delay_s = FIRST_DELAY_S
    while True:
        try:
            return call()
        except RayTaskError as error:
            cause = unwrap(error)
            if not isinstance(cause, BackPressureError):
                raise cause from error
            last: Exception = cause
        except (*GONE, GetTimeoutError, ServeBackPressureError, RayServeException, BackPressureError) as error:
            last = error
        except (TimeoutError, RayError) as error:
            last = error
        if stop.wait(delay_s):
            raise RequestCancelledError(f"{what}: given up before a replica answered.") from last
        if time.monotonic() > deadline:
            raise ServiceError(f"{what}: no replica answered for {patience_s:.0f} s: {first_line(last)}") from last
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)
