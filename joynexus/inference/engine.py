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

A prediction may be interrupted between two layers for others' requests (:mod:`joynexus.scheduling.preemption`). What
those come to is the same as by themselves, and so is what it comes to: nothing but local variables is half done there.
"""

import logging
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch

from joynexus.errors import JoyNexusError
from joynexus.inference.encode_rates import EncodeRates
from joynexus.inference.heads import HeadJob, act, check_seeds, check_state
from joynexus.inference.interruption import Pace, Urgent, visitor
from joynexus.inference.parts import (
    Part,
    adapters_of,
    answer_of,
    backbone_failed,
    cut_decision,
    grouped,
    join,
    row_counts,
    tenant_failed,
)
from joynexus.inference.policies import PolicyTable
from joynexus.inference.stacks import HeadStacks
from joynexus.models.adapters import activated
from joynexus.models.backbone import Backbone, load_backbone
from joynexus.models.pauses import visited
from joynexus.models.policy import encode, prefix_keys, prepare_prefix
from joynexus.models.prefix import PrefixFeatures, to_arrays
from joynexus.models.prefix_store import PrefixStore
from joynexus.observability.device_clock import DeviceClock, device_cores, device_marks
from joynexus.observability.engine_usage import EngineLedger, EngineUsage
from joynexus.observability.group_log import GroupColumns
from joynexus.observability.idle_clock import IdleClock
from joynexus.scheduling.cost import Measured
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.service import InferenceSpec
from joynexus.types import ActionChunk, PolicySnapshot, PredictRequest

log = logging.getLogger(__name__)


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

    def predict(
        self, requests: Sequence[PredictRequest], urgent: Urgent | None = None
    ) -> list[ActionChunk | JoyNexusError]:
        """Act for a group of requests, best of one schema signature.

        Args:
            requests: Of any tenants and versions.
            urgent: Requests that come meanwhile, and for which this prediction is interrupted; None: for nobody.

        Returns:
            One answer per request, in order: its chunk, or the error that this request alone has caused.
        """
        visit = None if urgent is None else visitor(urgent, self._run_aside, Pace(self._backbone.device))
        with self._predicting, self._ledger.idle.working(), self._clock.step(), visited(visit):
            answers = self._run(requests)
        self._forget_removed()
        return answers

    def _run_aside(self, requests: Sequence[PredictRequest]) -> list[ActionChunk | JoyNexusError]:
        """Act for requests in the middle of others', and leave everything of those as it is."""
        with visited(None), activated(None), self._clock.aside(request.tenant for request in requests):
            return self._run(requests)

    @torch.no_grad()
    def _run(self, requests: Sequence[PredictRequest]) -> list[ActionChunk | JoyNexusError]:
        prepared = [self._prepare(request) for request in requests]
        parts = [each for each in prepared if isinstance(each, Part)]
        self._clock.takes_part(part.served.tenant for part in parts)  # they bear what nobody caused alone
        kinds = [(part.served.parts.signature, part.served.policy.reuse_prefixes) for part in parts]
        for group in grouped(parts, kinds):
            self._encode(group)
        encoded = [part for part in parts if part.answer is None]
        versions = grouped(encoded, [(part.served, part.request.deterministic) for part in encoded])
        for stack in self._stackable(versions):
            self._act_together(stack)
        if encoded:
            self._ledger.record_group(row_counts(encoded))
        for part in encoded:
            self._complete(part)
        return [answer_of(each) if isinstance(each, Part) else each for each in prepared]

    def _complete(self, part: Part) -> None:
        """Add to an answer what its rollout may ship, and what encoding it again would cost."""
        if not isinstance(part.answer, ActionChunk):
            return
        seconds, features = self._rates.seconds_per_row(part.served.tenant), None
        ships = part.request.with_features and part.served.parts.adapter is None
        if ships and part.features is not None and part.features.is_shippable:
            with self._clock.span(part.served.tenant, "copy"):
                features = to_arrays(part.features)
        part.answer = replace(part.answer, features=features, prefix_seconds=seconds)

    def _prepare(self, request: PredictRequest) -> Part | JoyNexusError:
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
            return tenant_failed(request, error)
        return Part(request=request, served=served, prefix=prefix, keys=keys)

    def _encode(self, group: list[Part]) -> None:
        """Get the features of rows of one signature; the time goes to those who caused rows to be encoded."""
        with self._clock.shared("prefix") as span:
            self._encode_together(group)
            span.split = {tenant: float(each.encoded) for tenant, each in row_counts(group).items()}
            if not any(span.split.values()):  # all were found: the time is that of the look-up
                span.kind = "copy"
                span.split = {tenant: float(each.samples) for tenant, each in row_counts(group).items()}

    def _encode_together(self, group: list[Part]) -> None:
        keys, served = [key for part in group for key in part.keys], group[0].served
        store = self._store if served.policy.reuse_prefixes else None
        try:
            features, count = encode(
                self._backbone, store, join(group), keys, served.parts.signature, adapters=adapters_of(group)
            )
        except Exception as error:
            if len(group) > 1:
                log.warning("a forward of %d requests failed (%r): each is tried alone", len(group), error)
                for part in group:
                    with self._clock.span(part.served.tenant, "prefix"):
                        self._encode_together([part])
                return
            log.exception("tenant %s: the backbone failed on a request", group[0].served.tenant)
            group[0].answer = backbone_failed(group[0].request, error)
            return
        start = 0
        for part in group:
            stop = start + part.rows
            part.features = features.slice(start, stop)
            part.encoded = sum(count.encoded[start:stop])
            start = stop

    def _stackable(self, versions: list[list[Part]]) -> list[list[list[Part]]]:
        """Put rows of versions together whose modules may act as one stack."""
        stacks: dict[Hashable, list[list[Part]]] = {}
        for group in versions:
            served, deterministic = group[0].served, group[0].request.deterministic
            key = self._heads.key(served) or served
            stacks.setdefault((key, deterministic), []).append(group)
        return list(stacks.values())

    def _act_together(self, versions: list[list[Part]]) -> None:
        """Run the modules of several versions over their rows; where that fails, each by itself."""
        if len(versions) == 1:
            self._act(versions[0])
            return
        # A stack's slots are its own state: no other group may seat its versions there in the middle of a run.
        with self._clock.shared("head_forward") as span, visited(None):
            rows = row_counts([part for group in versions for part in group])
            span.split = {tenant: float(each.samples) for tenant, each in rows.items()}
            try:
                decisions = self._heads.act([self._job(group) for group in versions])
            except Exception as error:  # noqa: BLE001  # whose fault it is shows below
                log.warning("modules of %d versions failed (%r): each acts by itself", len(versions), error)
                decisions = None
            for group, decision in zip(versions, decisions or [], strict=decisions is not None):
                cut_decision(group, decision)
        if decisions is None:
            for group in versions:
                self._act(group)

    def _act(self, group: list[Part]) -> None:
        """Run the module of one policy version over all its rows."""
        served = group[0].served
        with self._clock.span(served.tenant, "head_forward"):
            try:
                cut_decision(group, act(self._job(group)))
            except Exception as error:
                if len(group) > 1:
                    log.warning("tenant %s: %d requests failed (%r): each alone now", served.tenant, len(group), error)
                    for part in group:
                        self._act([part])
                    return
                log.exception("tenant %s, version %d: the module failed", served.tenant, served.version)
                group[0].answer = tenant_failed(group[0].request, error)

    def _job(self, group: list[Part]) -> HeadJob:
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
