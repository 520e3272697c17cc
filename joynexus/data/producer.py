"""Demonstrations as a numbered row of lane items. No Ray: item ``n`` holds the same samples in every process.

From the second epoch on, items go *light*, without frames, where the trainer is likely to have the features of all
their rows; it asks for an item in full where it has not. See :mod:`joynexus.data.light_epochs`.
"""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from joynexus.data.episodes import EpisodeDataset
from joynexus.data.fit_report import FitReport, measure_fit
from joynexus.data.light_epochs import LightEpochs
from joynexus.data.sampler import EpochSampler
from joynexus.errors import SpecError
from joynexus.specs.contract import InterfaceContract, check_policy
from joynexus.specs.registry import load_implementation
from joynexus.specs.tenant import PolicySpec, SftSpec, TenantSpec
from joynexus.types import NEVER_STALE, LaneItem, PolicyStats, ViewSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LightCounts:
    """What light items came to since the engine was opened."""

    light_items: int = 0
    """Items made without frames."""
    fetched_items: int = 0
    """Of those, the ones that the trainer asked for in full."""
    saved_bytes: int = 0
    """Bytes of frames that were neither read nor sent."""


class ProducerEngine:
    """Makes the micro-batches of one SFT workload, by ordinal.

    A producer that is restarted, or a trainer that resumed from a checkpoint, asks for the ordinal that it lacks;
    nothing has to be replayed or remembered. ``num_items`` micro-batches finish the workload. Thread-safe: one thread
    makes items ahead while another answers for one that is wanted in full.
    """

    def __init__(
        self,
        dataset: EpisodeDataset,
        sampler: EpochSampler,
        *,
        tenant: str,
        workload: int,
        horizon: int,
        num_items: int,
        frame_bytes: int = 0,
        light_epochs: bool = False,
    ) -> None:
        """Number the micro-batches of an open dataset.

        Args:
            dataset: Open.
            sampler: Over all its frames.
            tenant: Whose.
            workload: Index of the workload.
            horizon: Of the policy's action chunks.
            num_items: Micro-batches of the workload.
            frame_bytes: Bytes of one row's frames, for the count of what was saved.
            light_epochs: Whether items may go without frames.

        Raises:
            SpecError: If sampler and dataset disagree on the number of frames.
        """
        if sampler.num_samples != dataset.num_frames:
            raise SpecError(
                f"tenant {tenant!r}: the sampler draws from {sampler.num_samples} samples, the dataset has "
                f"{dataset.num_frames} frames. Make the sampler from the dataset's num_frames."
            )
        self.num_items = num_items
        self._dataset = dataset
        self._sampler = sampler
        self._tenant = tenant
        self._workload = workload
        self._horizon = horizon
        self._lock = threading.Lock()
        self._light = LightEpochs(sampler, is_enabled=light_epochs)
        self._counts = LightCounts()
        self._frame_bytes = frame_bytes

    @classmethod
    def open(cls, tenant: TenantSpec, workload: int, spec: SftSpec, *, light_epochs: bool = False) -> "ProducerEngine":
        """Open and verify a workload's dataset, and number its micro-batches.

        Args:
            tenant: Whose seed decides the order; its dataset paths are absolute.
            workload: Index of the workload, which enters the ids of the items.
            spec: The workload.
            light_epochs: Whether items may go without frames; without cameras there is nothing to leave out, and where
                features are not kept nothing to find.

        Raises:
            DatasetError: If a file is missing, truncated or inconsistent.
            ContractError: If dataset and policy disagree; nothing is kept open.
            UnknownComponentError: If the dataset's implementation can't be imported.
        """
        seen = tenant.policy.observation
        dataset = open_dataset(spec, tenant.policy, owner=tenant.tenant)
        return cls(
            dataset,
            EpochSampler(dataset.num_frames, spec.batch_size, seed=tenant.seed),
            tenant=tenant.tenant,
            workload=workload,
            horizon=tenant.policy.action.horizon,
            num_items=spec.num_steps * spec.gradient_accumulation,
            frame_bytes=len(seen.cameras) * math.prod(seen.image_size) * 3,
            light_epochs=light_epochs and len(seen.cameras) > 0 and tenant.policy.shares_prefixes,
        )

    @property
    def contract(self) -> InterfaceContract:
        """What the dataset declares."""
        return self._dataset.contract

    @property
    def instructions(self) -> tuple[str, ...]:
        """The instructions of the dataset, as far as it knows them."""
        return self._dataset.instructions

    def statistics(self) -> PolicyStats:
        """Compute the dataset's statistics over all its frames."""
        return self._dataset.statistics()

    def fit(self, stats: PolicyStats, policy: PolicySpec) -> FitReport | None:
        """Compare the dataset with the statistics that the policy normalises with; None where they are its own."""
        with self._lock:
            return measure_fit(self._dataset, stats, policy)

    @property
    def light_counts(self) -> LightCounts:
        """What light items came to so far."""
        return self._counts

    def begin(self, first: int, *, stored_from: int) -> None:
        """Say where :meth:`next_item` begins, and what the trainer may have kept.

        Args:
            first: Ordinal of the first item to come.
            stored_from: The trainer that runs now got the items from here to ``first`` in full; equal to ``first`` for
                one that was made anew.
        """
        with self._lock:
            self._light.begin(first, stored_from=stored_from)

    def next_item(self, ordinal: int) -> LaneItem:
        """Make the next item for the lane: light where the trainer should have the features of every row.

        Args:
            ordinal: One more than the last one, or the ``first`` of :meth:`begin`.

        Raises:
            DatasetError: If a sample can't be read; the row never just ends.
        """
        with self._lock:
            is_light = self._light.choose(ordinal)
            item = self._item(ordinal, with_frames=not is_light)
            if is_light:
                self._count(light=1, saved_rows=item.cost)
            return item

    def full_item(self, ordinal: int) -> LaneItem:
        """Make an item in full that was sent light, for a trainer that lacks a row's features.

        Raises:
            DatasetError: If a sample can't be read.
        """
        with self._lock:
            item = self._item(ordinal, with_frames=True)
            self._light.fetched(ordinal)
            self._count(fetched=1, saved_rows=-item.cost)
            return item

    def item(self, ordinal: int) -> LaneItem:
        """Make one micro-batch in full.

        Args:
            ordinal: Index of the micro-batch in its workload, from 0.

        Raises:
            DatasetError: If a sample can't be read; the row never just ends.
        """
        with self._lock:
            return self._item(ordinal, with_frames=True)

    def _item(self, ordinal: int, *, with_frames: bool) -> LaneItem:
        rows = self._sampler.batch(ordinal)
        return LaneItem(
            item_id=f"{self._tenant}/w{self._workload}/b{ordinal}",
            tenant=self._tenant,
            workload=self._workload,
            ordinal=ordinal,
            policy_version=NEVER_STALE,
            payload=self._dataset.read(rows, self._horizon, with_frames=with_frames),
        )

    def _count(self, *, light: int = 0, fetched: int = 0, saved_rows: int) -> None:
        known = self._counts
        self._counts = LightCounts(
            light_items=known.light_items + light,
            fetched_items=known.fetched_items + fetched,
            saved_bytes=known.saved_bytes + saved_rows * self._frame_bytes,
        )

    def items(self, first: int = 0) -> Iterator[LaneItem]:
        """Make the micro-batches from one ordinal on to the workload's last."""
        return (self.item(ordinal) for ordinal in range(first, self.num_items))

    def close(self) -> None:
        """Close the dataset."""
        self._dataset.close()


def open_dataset(workload: SftSpec, policy: PolicySpec, *, owner: str) -> EpisodeDataset:
    """Open a workload's dataset and check that the policy can learn from it.

    Args:
        workload: Whose dataset to open.
        policy: The policy that will be trained on it.
        owner: The tenant, for messages.

    Raises:
        DatasetError: If a file is missing, truncated or inconsistent.
        ContractError: If dataset and policy disagree; nothing is kept open.
        UnknownComponentError: If the dataset's implementation can't be imported.
    """
    seen = policy.observation
    implementation: type[EpisodeDataset] = load_implementation(workload.dataset)
    dataset = implementation.open(workload.dataset, ViewSpec(cameras=seen.cameras, image_size=seen.image_size))
    try:
        check_policy(policy.interface, dataset.contract, owner=owner)
    except BaseException:
        dataset.close()
        raise
    return dataset
