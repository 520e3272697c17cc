"""What one tenant needs of a service, worked out from the two specs alone.

Pure: no Ray, no torch, no clock. The Master compiles a plan before it admits a tenant, ``joynexus plan`` prints it,
and both refuse the same things with the same words.
"""

from typing import Literal

from joynexus.errors import AdmissionError, SpecError, UnknownComponentError
from joynexus.specs.backbone import BackboneSpec
from joynexus.specs.base import Resources, Spec
from joynexus.specs.messages import suggest
from joynexus.specs.service import ServiceSpec
from joynexus.specs.signature import PrefixLayout, prefix_layout
from joynexus.specs.tenant import EvaluationSpec, PolicySpec, RlSpec, SftSpec, TenantSpec, Workload

BYTES_PER_PARAMETER = {"float32": 16, "bfloat16": 12}
"""By the type of AdamW's two moments, which come on top of a float32 parameter and its gradient."""
ACTIVATIONS_PER_UNIT = 8
"""Numbers kept for backward per hidden unit and token: rough, for attention, MLP and norms together."""


class Bundle(Spec):
    """What one actor of the tenant reserves."""

    role: str
    """The actor's name: ``producer:TENANT`` or ``environment:TENANT:INDEX``."""
    resources: Resources


class WorkloadPlan(Spec):
    """Who runs one workload."""

    type: Literal["sft", "rl", "evaluation"]
    label: str
    """Dataset or environment."""
    min_workers: int
    """EnvironmentActors that are always kept; 0 for SFT, whose one DataProducer is no worker."""
    max_workers: int


class LanePlan(Spec):
    """The tenant's part of the training queue."""

    items: int
    nbytes: int
    weight: float
    priority: Literal["low", "normal", "high"]


class MemoryEstimate(Spec):
    """Device memory of the tenant's training slot, in bytes."""

    module: int
    """Parameters, gradients and optimizer moments, the adapter's included."""
    activations: int
    """Of one micro-batch through the module, and through the backbone where there is an adapter; rough."""
    prefix: int
    """Prefix features of one micro-batch."""

    @property
    def total(self) -> int:
        """What the slot takes at its peak."""
        return self.module + self.activations + self.prefix


class AdapterPlan(Spec):
    """What a tenant's adapter costs, beside its action module."""

    parameters: int
    """Trainable parameters; an estimate where only the checkpoint knows the backbone's sizes."""
    module: int
    """Bytes of parameters, gradients and optimizer moments; contained in the slot's."""
    activations: int
    """Bytes of the prefix's graph for one micro-batch, which its gradient needs; contained in the slot's. Rough."""
    reuses_prefixes: bool = False
    """Never: the prefix is the tenant's own and changes with every update, so that each epoch encodes it again, with
    gradient, and nothing of it is kept, found or shipped."""


class TenantPlan(Spec):
    """A tenant, compiled for one service."""

    tenant: str
    backbone: str
    """Name in the service."""
    layout: PrefixLayout
    module_parameters: int
    """Trainable parameters of the action module; an estimate, until it is built."""
    adapter: AdapterPlan | None = None
    """None where the backbone stays as it is."""
    memory: MemoryEstimate
    bundles: tuple[Bundle, ...]
    """The tenant's placement group. Workloads run one after the other: a worker's bundle serves all of them, and
    is as large as the largest of them needs."""
    elastic: tuple[Bundle, ...]
    """Workers beyond it, up to ``max_workers``; each is placed only while the trainer is hungry."""
    workloads: tuple[WorkloadPlan, ...]
    lane: LanePlan

    @property
    def signature(self) -> str:
        """Schema signature."""
        return self.layout.signature


def producer_role(tenant: str) -> str:
    """Name of a tenant's DataProducer."""
    return f"producer:{tenant}"


def environment_role(tenant: str, index: int) -> str:
    """Name of a tenant's EnvironmentActor ``index``."""
    return f"environment:{tenant}:{index}"


def items_in_flight(tenant: TenantSpec, workload: Workload) -> int:
    """Return how many lane items a workload holds at most before it acknowledges any: those between two checkpoints.

    Twice as many for RL, whose next iteration is collected while this one is learnt from.
    """
    if isinstance(workload, SftSpec):
        return (tenant.checkpoint_every + 2) * workload.gradient_accumulation
    return 2 * workload.rollout.episodes_per_iteration if isinstance(workload, RlSpec) else 0


def compile_plan(tenant: TenantSpec, service: ServiceSpec) -> TenantPlan:
    """Work out what a tenant needs.

    Args:
        tenant: The tenant.
        service: The service that it is submitted to.

    Returns:
        The plan; whether the service has room for it now is :func:`joynexus.scheduling.admission.admit`'s question.

    Raises:
        UnknownComponentError: If the service has no backbone of that name.
        SpecError: If the backbone or the action module can't take the observations, or the backbone not the adapter.
        AdmissionError: If the tenant exceeds a quota.
    """
    policy = tenant.policy
    backbone = _backbone(tenant, service)
    _check_prefix(tenant, backbone)
    parameters = policy.action_module.num_parameters(
        prefix_dim=backbone.hidden_dim(),
        state_dim=policy.observation.state_dim,
        action_dim=policy.action.dim,
        horizon=policy.action.horizon,
    )
    rows = min(max((_rows(each) for each in tenant.workloads), default=1), service.training.max_group_samples)
    adapter = _adapter(tenant, service, rows)
    reserved, elastic = _bundles(tenant)
    plan = TenantPlan(
        tenant=tenant.tenant,
        backbone=policy.backbone,
        layout=prefix_layout(backbone, policy.observation),
        module_parameters=parameters,
        adapter=adapter,
        memory=_memory(service, policy, parameters, adapter, rows),
        bundles=reserved,
        elastic=elastic,
        workloads=tuple(_workload(each) for each in tenant.workloads),
        lane=LanePlan(
            items=service.queue.lane_items,
            nbytes=service.queue.lane_bytes,
            weight=tenant.weight,
            priority=tenant.priority,
        ),
    )
    _check_quotas(plan, service)
    return plan


def _backbone(tenant: TenantSpec, service: ServiceSpec) -> BackboneSpec:
    name = tenant.policy.backbone
    if name not in service.backbones:
        raise UnknownComponentError(
            f"{tenant.tenant}: policy.backbone: service {service.service!r} has no backbone {name!r}. "
            f"{suggest(name, service.backbones)}"
        )
    return service.backbones[name]


def _check_prefix(tenant: TenantSpec, backbone: BackboneSpec) -> None:
    seen, module = tenant.policy.observation, tenant.policy.action_module
    where = f"{tenant.tenant}: policy.observation"
    if seen.cameras and min(seen.image_size) < backbone.min_image_size:
        raise SpecError(
            f"{where}.image_size: {list(seen.image_size)} is below what backbone {tenant.policy.backbone!r} takes. "
            f"Give at least {backbone.min_image_size} pixels a side."
        )
    length = backbone.prefix_length(len(seen.cameras), seen.image_size, seen.max_prompt_tokens)
    longest = module.longest_prefix()
    if longest is not None and length > longest:
        raise SpecError(
            f"{where}: {len(seen.cameras)} cameras of {list(seen.image_size)} and {seen.max_prompt_tokens} prompt "
            f"tokens make a prefix of {length} positions, and action module {module.type!r} reads {longest}. "
            f"Raise its max_prefix_tokens to {length}, or give smaller images or a smaller max_prompt_tokens."
        )


def _adapter(tenant: TenantSpec, service: ServiceSpec, rows: int) -> AdapterPlan | None:
    spec, name, seen = tenant.policy.adapter, tenant.policy.backbone, tenant.policy.observation
    if spec is None:
        return None
    backbone = service.backbones[name]
    layers = backbone.adapter_layers()
    unknown = [target for target in spec.targets if target not in layers]
    if unknown:
        known = f"Use some of {list(layers)}." if layers else "Leave 'adapter' out, or take a vision-language backbone."
        where = f"{tenant.tenant}: policy.adapter.targets"
        raise SpecError(f"{where}: backbone {name!r} ({backbone.type}) has no layers {unknown}. {known}")
    sizes = [layers[target] for target in spec.targets]
    parameters = sum(count * spec.rank * (inputs + outputs) for count, inputs, outputs in sizes)
    # Each linear layer of each token keeps about what enters and what leaves it.
    kept = sum(count * (inputs + outputs) for count, inputs, outputs in layers.values())
    length = backbone.prefix_length(len(seen.cameras), seen.image_size, seen.max_prompt_tokens)
    return AdapterPlan(
        parameters=parameters,
        module=BYTES_PER_PARAMETER[service.training.moments] * parameters,
        activations=kept * backbone.bytes_per_number * length * rows,
    )


def _rows(workload: Workload) -> int:
    """Return the rows of one training micro-batch."""
    if isinstance(workload, SftSpec):
        return workload.batch_size
    return workload.algorithm.batch_rows() if isinstance(workload, RlSpec) else 1


def _memory(
    service: ServiceSpec, policy: PolicySpec, parameters: int, adapter: AdapterPlan | None, rows: int
) -> MemoryEstimate:
    backbone = service.backbones[policy.backbone]
    seen = policy.observation
    prefix = backbone.prefix_bytes(len(seen.cameras), seen.image_size, seen.max_prompt_tokens)
    # A module of P parameters and width D has about P / D hidden units; each of the chunk's tokens passes them all.
    units = parameters // backbone.hidden_dim() + 1
    return MemoryEstimate(
        module=BYTES_PER_PARAMETER[service.training.moments] * parameters + (adapter.module if adapter else 0),
        activations=4 * ACTIVATIONS_PER_UNIT * units * policy.action.horizon * rows
        + (adapter.activations if adapter else 0),
        prefix=prefix * rows,
    )


def _bundles(tenant: TenantSpec) -> tuple[tuple[Bundle, ...], tuple[Bundle, ...]]:
    """Return what is reserved and what may come on top."""
    producers = [each.resources for each in tenant.workloads if isinstance(each, SftSpec)]
    reserved = [Bundle(role=producer_role(tenant.tenant), resources=largest(producers))] if producers else []
    elastic: list[Bundle] = []
    for index in range(max((_workers(each)[1] for each in tenant.workloads), default=0)):
        kept = [_worker_resources(each) for each in tenant.workloads if index < _workers(each)[0]]
        wanted = [_worker_resources(each) for each in tenant.workloads if index < _workers(each)[1]]
        role = environment_role(tenant.tenant, index)
        (reserved if kept else elastic).append(Bundle(role=role, resources=largest(wanted)))
    return tuple(reserved), tuple(elastic)


def _workers(workload: Workload) -> tuple[int, int]:
    """Return the EnvironmentActors that a workload always has, and those that it has at most."""
    if isinstance(workload, RlSpec):
        return workload.rollout.min_workers, workload.rollout.max_workers
    return (workload.num_workers, workload.num_workers) if isinstance(workload, EvaluationSpec) else (0, 0)


def _worker_resources(workload: Workload) -> Resources:
    assert isinstance(workload, RlSpec | EvaluationSpec)
    return workload.environment.resources


def largest(needs: list[Resources]) -> Resources:
    """Return resources that cover each of several needs, one at a time."""
    names = {name for each in needs for name in each.custom}
    return Resources(
        num_cpus=max(each.num_cpus for each in needs),
        num_gpus=max(each.num_gpus for each in needs),
        memory_bytes=max(each.memory_bytes for each in needs),
        custom={name: max(each.custom.get(name, 0.0) for each in needs) for name in sorted(names)},
    )


def _workload(workload: Workload) -> WorkloadPlan:
    source = workload.dataset if isinstance(workload, SftSpec) else workload.environment
    fewest, most = _workers(workload)
    return WorkloadPlan(type=workload.type, label=source.label, min_workers=fewest, max_workers=most)


def _check_quotas(plan: TenantPlan, service: ServiceSpec) -> None:
    quotas = service.quotas
    workers = max((each.max_workers for each in plan.workloads), default=0)
    if workers > quotas.max_env_workers:
        raise AdmissionError(
            f"tenant {plan.tenant!r}: asks for {workers} environment workers, the quota is {quotas.max_env_workers}. "
            "Lower max_workers or num_workers, or ask the operator for more."
        )
    if plan.memory.module > quotas.max_module_bytes:
        raise AdmissionError(
            f"tenant {plan.tenant!r}: its action module takes {plan.memory.module} bytes with gradients and optimizer "
            f"({plan.module_parameters} parameters), the quota is {quotas.max_module_bytes} bytes. "
            "Take a smaller module, or ask the operator for more."
        )
