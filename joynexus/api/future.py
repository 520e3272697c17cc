"""Futures over Ray's object references and Serve's responses."""

import asyncio
from collections.abc import Generator
from typing import Any, Generic, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.serve.handle import DeploymentResponse

from joynexus.actors.roles import unwrap

Answer = TypeVar("Answer")


class Future(Generic[Answer]):
    """The answer to a call, once it is there; wait with ``result()`` or ``await``."""

    def __init__(self, pending: Any) -> None:  # noqa: ANN401  # a Ray reference or a Serve response
        self._pending = pending

    def done(self) -> bool:
        """Whether the answer, or the error, is there."""
        try:
            self.result(timeout_s=0)
        except TimeoutError:
            return False
        except Exception:  # noqa: BLE001  # an error is an answer too
            return True
        return True

    def result(self, timeout_s: float | None = None) -> Answer:
        """Wait for the answer.

        Raises:
            TimeoutError: After ``timeout_s``; the call goes on.
            JoyNexusError: What the call was refused for or failed with, as its own class.
        """
        try:
            if isinstance(self._pending, DeploymentResponse):
                return cast("Answer", cast("Any", self._pending).result(timeout_s=timeout_s))
            return cast("Answer", ray.get(self._pending, timeout=timeout_s))
        except GetTimeoutError as error:
            raise TimeoutError(f"no answer within {timeout_s} s") from error
        except RayTaskError as error:
            raise unwrap(error) from error

    def __await__(self) -> Generator[Any, None, Answer]:
        """Wait without blocking the event loop."""
        return asyncio.to_thread(self.result).__await__()
