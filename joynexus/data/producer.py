"""Demonstrations as a numbered stream of lane items. No Ray and no state: item ``n`` is the same in every process."""

from collections.abc import Iterator

from joynexus.data.episodes import EpisodeDataset
from joynexus.data.sampler import EpochSampler
from joynexus.errors import SpecError
from joynexus.specs.contract import check_policy
from joynexus.specs.registry import load_implementation
from joynexus.specs.tenant import PolicySpec, SftSpec, TenantSpec
from joynexus.types import NEVER_STALE, LaneItem, ViewSpec


class ProducerEngine:
    """Makes the micro-batches of one SFT workload, by ordinal.

    A producer that is restarted, or a trainer that resumed from a checkpoint, asks for the ordinal that it lacks;
    nothing has to be replayed or remembered.
    """

    def __init__(
        self, dataset: EpisodeDataset, sampler: EpochSampler, *, tenant: str, workload: int, horizon: int
    ) -> None:
        if sampler.num_samples != dataset.num_frames:
            raise SpecError(
                f"tenant {tenant!r}: the sampler draws from {sampler.num_samples} samples, the dataset has "
                f"{dataset.num_frames} frames. Make the sampler from the dataset's num_frames."
            )
        self.dataset = dataset
        self.sampler = sampler
        self._tenant = tenant
        self._workload = workload
        self._horizon = horizon

    def item(self, ordinal: int) -> LaneItem:
        """Make one micro-batch.

        Args:
            ordinal: Index of the micro-batch in its workload, from 0.

        Raises:
            DatasetError: If a sample can't be read.
        """
        batch = self.dataset.read(self.sampler.batch(ordinal), self._horizon)
        return LaneItem(
            item_id=f"{self._tenant}/w{self._workload}/b{ordinal}",
            tenant=self._tenant,
            workload=self._workload,
            ordinal=ordinal,
            policy_version=NEVER_STALE,
            payload=batch,
        )

    def items(self, first: int = 0) -> Iterator[LaneItem]:
        """Make micro-batches without end, from one ordinal on."""
        while True:
            yield self.item(first)
            first += 1

    def close(self) -> None:
        """Close the dataset."""
        self.dataset.close()


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


def open_producer(spec: TenantSpec, workload: int) -> ProducerEngine:
    """Open the producer of a tenant's SFT workload.

    Args:
        spec: The tenant, with its dataset paths made absolute.
        workload: Index of the workload.

    Raises:
        SpecError: If the workload is no SFT workload; otherwise as :func:`open_dataset`.
    """
    sft = spec.workloads[workload]
    if not isinstance(sft, SftSpec):
        raise SpecError(f"tenant {spec.tenant!r}: workload {workload} is {sft.type!r}, which reads no dataset.")
    dataset = open_dataset(sft, spec.policy, owner=spec.tenant)
    sampler = EpochSampler(dataset.num_frames, sft.batch_size, seed=spec.seed)
    return ProducerEngine(dataset, sampler, tenant=spec.tenant, workload=workload, horizon=spec.policy.action.horizon)
