"""The inference engine: acting for many tenants in one forward of the shared backbone. No Ray.

    predict (one thread)                                   set_policy, remove_policy (any other thread)
      each request alone: find its version, check, tokenise   build the module, then swap one table entry
      rows of one signature: one backbone pass over what
        the prefix store lacks
      rows of one policy version: one pass of its module, as a stack with like modules where that pays
      each request alone: check, cut out, answer

The two columns share only the table of :mod:`joynexus.inference.policies`, which is read without a lock: a request
takes its version when it is checked and keeps it to the end. An error fails the request that caused it: where a
shared step fails, it is taken again for each request alone.
"""

import logging
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from joynexus.errors import JoyNexusError, ServiceError, TenantFailedError
from joynexus.inference.encode_rates import EncodeRates
from joynexus.inference.heads import HeadJob, act, check_seeds, check_state, to_chunk
from joynexus.inference.policies import PolicyTable, ServedPolicy
from joynexus.inference.stacks import HeadStacks
from joynexus.models.action_module import Decision
from joynexus.models.adapters import Adapter
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.policy import encode, prefix_keys, prepare_prefix
from joynexus.models.prefix import PrefixBatch, PrefixFeatures, to_arrays
from joynexus.models.prefix_store import PrefixStore
from joynexus.observability.device_clock import DeviceClock, device_cores, device_marks
from joynexus.observability.engine_usage import EngineLedger, EngineUsage, RowCount
from joynexus.observability.group_log import GroupColumns
from joynexus.observability.idle_clock import IdleClock
from joynexus.scheduling.cost import Measured
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.service import InferenceSpec
from joynexus.types import ActionChunk, PolicySnapshot, PredictRequest

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Part:
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
        return len(self.keys)


class InferenceEngine:
    """Serves the newest policy version of every tenant of one backbone, and its base."""

    def __init__(self, backbone: Backbone, spec: InferenceSpec, *, backbone_name: str) -> None:
        """Start without policies.

        Args:
            backbone: Frozen; shared by all tenants.
            spec: Budget of the prefix store.
            backbone_name: Its name in the service.
        """
        self._backbone = backbone
        self._policies = PolicyTable(backbone, backbone_name)
        self._store = PrefixStore(spec.prefix_store)
        self._heads = HeadStacks(spec.stack_heads)
        self._removed: deque[str] = deque()
        """Tenants whose parameters are still in a stack, because a prediction was running."""
        self._ledger = EngineLedger(num_cores=device_cores(backbone.device))
        self._clock = DeviceClock(self._ledger, device_marks(backbone.device))
        self._rates = EncodeRates(self._ledger.prefix_work)
        self._predicting = threading.Lock()  # the store and the clock are for one thread at a time

    @staticmethod
    def load(backbone: BackboneSpec, spec: InferenceSpec, *, backbone_name: str) -> "InferenceEngine":
        """Load the backbone, on the accelerator if the spec reserves one, and set the number of threads."""
        torch.set_num_threads(spec.num_threads)
        device = "cuda" if spec.resources.num_gpus else "cpu"
        return InferenceEngine(load_backbone(backbone, device), spec, backbone_name=backbone_name)

    def set_policy(self, snapshot: PolicySnapshot) -> bool:
        """Serve a version from now on; requests that run are finished with the version that they began with.

        Args:
            snapshot: A version that is resident, or older than the newest, is ignored, but for a missing base.

        Returns:
            Whether it was new.

        Raises:
            SpecError: If the policy is not for this backbone.
            CheckpointError: If the parameters do not fit the policy.
        """
        return self._policies.publish(snapshot)

    def remove_policy(self, tenant: str) -> None:
        """Forget a tenant's policy; unknown ones are ignored."""
        self._policies.remove(tenant)
        self._rates.forget(tenant)
        self._removed.append(tenant)
        self._forget_removed()

    def versions(self) -> dict[str, int]:
        """Return each tenant's newest resident version."""
        return self._policies.versions()

    def signature_of(self, tenant: str) -> str:
        """Return the schema signature of a tenant's policy.

        Raises:
            TenantNotFoundError: If it has none here.
        """
        return self._policies.find(tenant).parts.signature

    def usage(self) -> EngineUsage:
        """Return what was done so far, and for whom."""
        self._clock.settle()
        return self._ledger.usage()

    def spent(self, tenant: str) -> Measured:
        """Return what a tenant's requests have cost so far; on a GPU, as far as it was measured."""
        rows, prefix_s, seconds = self._ledger.work(tenant)
        return Measured(rows=rows.samples, encoded=rows.encoded, prefix_s=prefix_s, head_s=seconds - prefix_s)

    def groups_since(self, ordinal: int = 0) -> GroupColumns:
        """Return the groups from one on; there may be fewer than were run, evenly thinned out."""
        return self._ledger.groups.since(ordinal)

    @property
    def idle(self) -> IdleClock:
        """For the loop that drives the engine: to say why it does not."""
        return self._ledger.idle

    def predict(self, requests: Sequence[PredictRequest]) -> list[ActionChunk | JoyNexusError]:
        """Act for a group of requests, best of one schema signature.

        Args:
            requests: Of any tenants and versions.

        Returns:
            One answer per request, in order: its chunk, or the error that this request alone has caused.
        """
        with self._predicting, torch.no_grad(), self._ledger.idle.working(), self._clock.step():
            prepared = [self._prepare(request) for request in requests]
            parts = [each for each in prepared if isinstance(each, _Part)]
            self._clock.takes_part(part.served.tenant for part in parts)  # they bear what nobody caused alone
            kinds = [(part.served.parts.signature, part.served.policy.reuse_prefixes) for part in parts]
            for group in _groups(parts, kinds):
                self._encode(group)
            encoded = [part for part in parts if part.answer is None]
            versions = _groups(encoded, [(part.served, part.request.deterministic) for part in encoded])
            for stack in self._stackable(versions):
                self._act_together(stack)
            if encoded:
                self._ledger.record_group(_row_counts(encoded))
            for part in encoded:
                self._complete(part)
        self._forget_removed()
        return [_answer(each) if isinstance(each, _Part) else each for each in prepared]

    def _complete(self, part: _Part) -> None:
        """Add to an answer what its rollout may ship, and what encoding it again would cost."""
        if not isinstance(part.answer, ActionChunk):
            return
        seconds, features = self._rates.seconds_per_row(part.served.tenant), None
        ships = part.request.with_features and part.served.parts.adapter is None
        if ships and part.features is not None and part.features.is_shippable:
            with self._clock.span(part.served.tenant, "copy"):
                features = to_arrays(part.features)
        part.answer = replace(part.answer, features=features, prefix_seconds=seconds)

    def _prepare(self, request: PredictRequest) -> _Part | JoyNexusError:
        try:
            served = self._policies.find(request.tenant, request.version)
            check_seeds(request)
            prefix = prepare_prefix(self._backbone, served.policy, request.observation, served.parts.normalizer)
            check_state(request)
            is_shared = served.parts.adapter is None  # with one, a prefix is this version's: nobody looks for it
            keys = prefix_keys(prefix, served.parts.signature) if is_shared else [b""] * len(prefix)
        except JoyNexusError as error:
            return error
        except Exception as error:
            log.exception("tenant %s: a request could not be prepared", request.tenant)
            return _tenant_failed(request, error)
        return _Part(request=request, served=served, prefix=prefix, keys=keys)

    def _encode(self, group: list[_Part]) -> None:
        """Get the features of rows of one signature; the time goes to those who caused rows to be encoded."""
        with self._clock.shared("prefix") as span:
            self._encode_together(group)
            span.split = {tenant: float(each.encoded) for tenant, each in _row_counts(group).items()}
            if not any(span.split.values()):  # all were found: the time is that of the look-up
                span.kind = "copy"
                span.split = {tenant: float(each.samples) for tenant, each in _row_counts(group).items()}

    def _encode_together(self, group: list[_Part]) -> None:
        keys, served = [key for part in group for key in part.keys], group[0].served
        store = self._store if served.policy.reuse_prefixes else None
        try:
            features, count = encode(
                self._backbone, store, _join(group), keys, served.parts.signature, adapters=_adapters(group)
            )
        except Exception as error:
            if len(group) > 1:
                log.warning("a forward of %d requests failed (%r): each is tried alone", len(group), error)
                for part in group:
                    with self._clock.span(part.served.tenant, "prefix"):
                        self._encode_together([part])
                return
            log.exception("tenant %s: the backbone failed on a request", group[0].served.tenant)
            group[0].answer = _backbone_failed(group[0].request, error)
            return
        start = 0
        for part in group:
            stop = start + part.rows
            part.features = features.slice(start, stop)
            part.encoded = sum(count.encoded[start:stop])
            start = stop

    def _stackable(self, versions: list[list[_Part]]) -> list[list[list[_Part]]]:
        """Put rows of versions together whose modules may act as one stack."""
        stacks: dict[Hashable, list[list[_Part]]] = {}
        for group in versions:
            served, deterministic = group[0].served, group[0].request.deterministic
            key = self._heads.key(served) or served
            stacks.setdefault((key, deterministic), []).append(group)
        return list(stacks.values())

    def _act_together(self, versions: list[list[_Part]]) -> None:
        """Run the modules of several versions over their rows; where that fails, each by itself."""
        if len(versions) == 1:
            self._act(versions[0])
            return
        with self._clock.shared("head_forward") as span:
            rows = _row_counts([part for group in versions for part in group])
            span.split = {tenant: float(each.samples) for tenant, each in rows.items()}
            try:
                decisions = self._heads.act([self._job(group) for group in versions])
            except Exception as error:  # noqa: BLE001  # whose fault it is shows below
                log.warning("modules of %d versions failed (%r): each acts by itself", len(versions), error)
                decisions = None
            for group, decision in zip(versions, decisions or [], strict=decisions is not None):
                _cut(group, decision)
        if decisions is None:
            for group in versions:
                self._act(group)

    def _act(self, group: list[_Part]) -> None:
        """Run the module of one policy version over all its rows."""
        served = group[0].served
        with self._clock.span(served.tenant, "head_forward"):
            try:
                _cut(group, act(self._job(group)))
            except Exception as error:
                if len(group) > 1:
                    log.warning("tenant %s: %d requests failed (%r): each alone now", served.tenant, len(group), error)
                    for part in group:
                        self._act([part])
                    return
                log.exception("tenant %s, version %d: the module failed", served.tenant, served.version)
                group[0].answer = _tenant_failed(group[0].request, error)

    def _job(self, group: list[_Part]) -> HeadJob:
        state = np.concatenate([part.request.observation.state for part in group])
        return HeadJob(
            served=group[0].served,
            prefix=PrefixFeatures.concatenate([part.features for part in group if part.features is not None]),
            state=torch.tensor(state, device=self._backbone.device),
            seeds=[seed for part in group for seed in part.request.seeds],
            deterministic=group[0].request.deterministic,
        )

    def _forget_removed(self) -> None:
        """Take removed tenants out of the stacks, unless a prediction runs, which then does it at its end."""
        while self._removed and self._predicting.acquire(blocking=False):
            try:
                while self._removed:
                    self._heads.forget(self._removed.popleft())
            finally:
                self._predicting.release()


def _cut(group: Sequence[_Part], decision: Decision) -> None:
    """Give every request of one version its own rows."""
    start = 0
    for part in group:
        part.answer = to_chunk(decision, part.served, start, start + part.rows)
        start += part.rows


def _adapters(group: Sequence[_Part]) -> list[Adapter | None]:
    """Return the adapter of every row."""
    return [part.served.parts.adapter for part in group for _ in range(part.rows)]


def _row_counts(parts: Sequence[_Part]) -> dict[str, RowCount]:
    """Sum up by tenant what requests asked for, and where the features came from."""
    counts: dict[str, RowCount] = {}
    for part in parts:
        rows = RowCount(samples=part.rows, encoded=part.encoded, reused=part.rows - part.encoded)
        counts[part.served.tenant] = counts.get(part.served.tenant, RowCount()) + rows
    return counts


def _groups(parts: Sequence[_Part], keys: Sequence[Hashable]) -> list[list[_Part]]:
    """Sort parts by their keys; groups, and the parts in them, keep their order."""
    groups: dict[Hashable, list[_Part]] = {}
    for part, key in zip(parts, keys, strict=True):
        groups.setdefault(key, []).append(part)
    return list(groups.values())


def _join(group: Sequence[_Part]) -> PrefixBatch:
    if len(group) == 1:
        return group[0].prefix
    return PrefixBatch(
        images=torch.cat([part.prefix.images for part in group]),
        image_mask=torch.cat([part.prefix.image_mask for part in group]),
        tokens=torch.cat([part.prefix.tokens for part in group]),
        token_mask=torch.cat([part.prefix.token_mask for part in group]),
    )


def _answer(part: _Part) -> ActionChunk | JoyNexusError:
    assert part.answer is not None
    return part.answer


def _tenant_failed(request: PredictRequest, error: Exception) -> JoyNexusError:
    if isinstance(error, JoyNexusError):
        return error
    return TenantFailedError(
        f"tenant {request.tenant!r}: its policy failed on this request: {type(error).__name__}: {error}. "
        "Compare the observation with the policy spec."
    )


def _backbone_failed(request: PredictRequest, error: Exception) -> JoyNexusError:
    if isinstance(error, JoyNexusError):
        return error
    rows = len(request.observation)
    return ServiceError(
        f"tenant {request.tenant!r}: the backbone failed on {rows} rows: {type(error).__name__}: {error}. "
        "Send fewer rows, or try again."
    )
