"""Demonstrations as a numbered row of lane items. No Ray and no state: item ``n`` is the same in every process."""

from collections.abc import Iterator

from joynexus.data.episodes import EpisodeDataset
from joynexus.data.sampler import EpochSampler
from joynexus.errors import SpecError
from joynexus.specs.contract import InterfaceContract, check_policy
from joynexus.specs.registry import load_implementation
from joynexus.specs.tenant import PolicySpec, SftSpec, TenantSpec
from joynexus.types import NEVER_STALE, LaneItem, PolicyStats, ViewSpec


class ProducerEngine:
    """Makes the micro-batches of one SFT workload, by ordinal.

    A producer that is restarted, or a trainer that resumed from a checkpoint, asks for the ordinal that it lacks;
    nothing has to be replayed or remembered. ``num_items`` micro-batches finish the workload.
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
    ) -> None:
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

    @classmethod
    def open(cls, tenant: TenantSpec, workload: int, spec: SftSpec) -> "ProducerEngine":
        """Open and verify a workload's dataset, and number its micro-batches.

        Args:
            tenant: Whose seed decides the order; its dataset paths are absolute.
            workload: Index of the workload, which enters the ids of the items.
            spec: The workload.

        Raises:
            DatasetError: If a file is missing, truncated or inconsistent.
            ContractError: If dataset and policy disagree; nothing is kept open.
            UnknownComponentError: If the dataset's implementation can't be imported.
        """
        dataset = open_dataset(spec, tenant.policy, owner=tenant.tenant)
        return cls(
            dataset,
            EpochSampler(dataset.num_frames, spec.batch_size, seed=tenant.seed),
            tenant=tenant.tenant,
            workload=workload,
            horizon=tenant.policy.action.horizon,
            num_items=spec.num_steps * spec.gradient_accumulation,
        )

    @property
    def contract(self) -> InterfaceContract:
        """What the dataset declares."""
        return self._dataset.contract

    def statistics(self) -> PolicyStats:
        """Compute the dataset's statistics over all its frames."""
        return self._dataset.statistics()

    def item(self, ordinal: int) -> LaneItem:
        """Make one micro-batch.

        Args:
            ordinal: Index of the micro-batch in its workload, from 0.

        Raises:
            DatasetError: If a sample can't be read; the row never just ends.
        """
        return LaneItem(
            item_id=f"{self._tenant}/w{self._workload}/b{ordinal}",
            tenant=self._tenant,
            workload=self._workload,
            ordinal=ordinal,
            policy_version=NEVER_STALE,
            payload=self._dataset.read(self._sampler.batch(ordinal), self._horizon),
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
