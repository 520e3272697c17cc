"""One request on its way through a group of the inference engine, and how groups of them are sorted and answered."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from joynexus.errors import JoyNexusError, ServiceError, TenantFailedError
from joynexus.inference.heads import to_chunk
from joynexus.inference.policies import ServedPolicy
from joynexus.models.action_module import Decision
from joynexus.models.adapters import Adapter
from joynexus.models.prefix import PrefixBatch, PrefixFeatures
from joynexus.observability.engine_usage import RowCount
from joynexus.types import ActionChunk, PredictRequest


@dataclass(kw_only=True, slots=True, eq=False)
class Part:
    """One request on its way through a group."""

    request: PredictRequest
    served: ServedPolicy
    prefix: PrefixBatch
    keys: list[bytes]
    features: PrefixFeatures | None = None
    encoded: int = 0
    """Rows that the backbone ran over because of this request."""
    answer: ActionChunk | JoyNexusError | None = None

    @property
    def rows(self) -> int:
        """Rows of the request."""
        return len(self.keys)


def cut_decision(group: Sequence[Part], decision: Decision) -> None:
    """Give every request of one version its own rows."""
    start = 0
    for part in group:
        part.answer = to_chunk(decision, part.served, start, start + part.rows)
        start += part.rows


def adapters_of(group: Sequence[Part]) -> list[Adapter | None]:
    """Return the adapter of every row."""
    return [part.served.parts.adapter for part in group for _ in range(part.rows)]


def row_counts(parts: Sequence[Part]) -> dict[str, RowCount]:
    """Sum up by tenant what requests asked for, and where the features came from."""
    counts: dict[str, RowCount] = {}
    for part in parts:
        rows = RowCount(samples=part.rows, encoded=part.encoded, reused=part.rows - part.encoded)
        counts[part.served.tenant] = counts.get(part.served.tenant, RowCount()) + rows
    return counts


def grouped(parts: Sequence[Part], keys: Sequence[Hashable]) -> list[list[Part]]:
    """Sort parts by their keys; groups, and the parts in them, keep their order."""
    groups: dict[Hashable, list[Part]] = {}
    for part, key in zip(parts, keys, strict=True):
        groups.setdefault(key, []).append(part)
    return list(groups.values())


def join(group: Sequence[Part]) -> PrefixBatch:
    """Put the rows of several requests together."""
    if len(group) == 1:
        return group[0].prefix
    return PrefixBatch(
        images=torch.cat([part.prefix.images for part in group]),
        image_mask=torch.cat([part.prefix.image_mask for part in group]),
        tokens=torch.cat([part.prefix.tokens for part in group]),
        token_mask=torch.cat([part.prefix.token_mask for part in group]),
    )


def answer_of(part: Part) -> ActionChunk | JoyNexusError:
    """Return what a request that went all the way is answered."""
    assert part.answer is not None
    return part.answer


def tenant_failed(request: PredictRequest, error: Exception) -> JoyNexusError:
    """Type an error that a tenant's own part raised."""
    if isinstance(error, JoyNexusError):
        return error
    return TenantFailedError(
        f"tenant {request.tenant!r}: its policy failed on this request: {type(error).__name__}: {error}. "
        "Compare the observation with the policy spec."
    )


def backbone_failed(request: PredictRequest, error: Exception) -> JoyNexusError:
    """Type an error that the backbone raised on a request by itself."""
    if isinstance(error, JoyNexusError):
        return error
    rows = len(request.observation)
    return ServiceError(
        f"tenant {request.tenant!r}: the backbone failed on {rows} rows: {type(error).__name__}: {error}. "
        "Send fewer rows, or try again."
    )
