import pytest

from joynexus.errors import AdmissionError, SpecError, UnknownComponentError
from joynexus.scheduling.plan import TenantPlan, compile_plan, items_in_flight
from joynexus.scheduling.sharing import sharing
from joynexus.specs.signature import prefix_layout


def roles(plan: TenantPlan) -> list[str]:
    return [each.role for each in plan.bundles]


def test_the_plan_holds_signature_lane_and_memory(make_tenant, make_service, sft):
    service, tenant = make_service(), make_tenant("alice", sft(batch_size=10))
    plan = compile_plan(tenant, service)
    assert plan.signature == prefix_layout(service.backbones["lite"], tenant.policy.observation).signature
    assert plan.lane.items == service.queue.lane_items
    assert plan.memory.module == 16 * plan.module_parameters
    prefix = service.backbones["lite"].prefix_bytes(1, (64, 64), 32)
    assert plan.memory.prefix == 10 * prefix
    assert plan.memory.total > plan.memory.module + plan.memory.prefix
    assert TenantPlan.model_validate_json(plan.model_dump_json()) == plan


def test_larger_modules_and_batches_need_more_memory(make_tenant, make_service, sft):
    service = make_service()
    small = compile_plan(make_tenant("a", sft()), service)
    wide = compile_plan(
        make_tenant("a", sft(), policy={"action_module": {"type": "gaussian", "hidden_dim": 512}}), service
    )
    batch = compile_plan(make_tenant("a", sft(batch_size=64)), service)
    assert wide.memory.module > small.memory.module
    assert batch.memory.activations == 16 * small.memory.activations


def test_a_batch_above_the_group_limit_counts_as_the_group_limit(make_tenant, make_service, sft):
    service = make_service(training={"max_group_samples": 8})
    plan = compile_plan(make_tenant("a", sft(batch_size=1000)), service)
    assert plan.memory.prefix == compile_plan(make_tenant("a", sft(batch_size=8)), service).memory.prefix


def test_workloads_use_one_set_of_workers_one_after_the_other(make_tenant, make_service, sft, rl, evaluation):
    tenant = make_tenant("alice", sft(), rl(2, 4, num_cpus=1.0), evaluation(3, num_cpus=0.5, num_gpus=0.25))
    plan = compile_plan(tenant, make_service())
    assert roles(plan) == ["producer:alice", *(f"environment:alice:{index}" for index in range(3))]
    needs = [(each.resources.num_cpus, each.resources.num_gpus) for each in plan.bundles]
    # Every worker that evaluation uses is as large as the larger of its two lives, never their sum.
    assert needs == [(0.2, 0.0), (1.0, 0.25), (1.0, 0.25), (1.0, 0.25)]
    assert [(each.role, each.resources.num_gpus) for each in plan.elastic] == [("environment:alice:3", 0.0)]


def test_two_sft_workloads_share_one_producer(make_tenant, make_service, sft):
    tenant = make_tenant("a", sft(resources={"num_cpus": 0.5}), sft(resources={"custom": {"disk": 1.0}}))
    (bundle,) = compile_plan(tenant, make_service()).bundles
    assert (bundle.resources.num_cpus, bundle.resources.custom) == (1.0, {"disk": 1.0})


def test_a_tenant_without_workloads_reserves_nothing(make_tenant, make_service):
    plan = compile_plan(make_tenant("a"), make_service())
    assert (plan.bundles, plan.elastic) == ((), ())


def test_an_unknown_backbone_is_refused_with_the_nearest_name(make_tenant, make_service):
    with pytest.raises(UnknownComponentError) as caught:
        compile_plan(make_tenant("a", policy={"backbone": "light"}), make_service())
    assert str(caught.value) == ("a: policy.backbone: service 'joynexus' has no backbone 'light'. Did you mean 'lite'?")


def test_images_below_the_backbones_minimum_are_refused(make_tenant, make_service):
    with pytest.raises(SpecError, match=r"a: policy.observation.image_size: \[64, 16\] is below .* at least 32 pixels"):
        compile_plan(make_tenant("a", image_size=[64, 16]), make_service())
    compile_plan(make_tenant("a", image_size=[64, 16], cameras=[]), make_service())


def test_a_prefix_longer_than_the_module_reads_is_refused(make_tenant, make_service):
    with pytest.raises(SpecError, match=r"a prefix of 96 positions, and action module 'gaussian' reads 64\. Raise"):
        compile_plan(make_tenant("a", image_size=[256, 256]), make_service())
    reading = {"action_module": {"type": "gaussian", "max_prefix_tokens": 96}}
    compile_plan(make_tenant("a", image_size=[256, 256], policy=reading), make_service())


def test_quotas_are_kept(make_tenant, make_service, rl):
    service = make_service(quotas={"max_env_workers": 3, "max_module_bytes": 100_000_000})
    compile_plan(make_tenant("a", rl(1, 3)), service)
    with pytest.raises(AdmissionError, match="asks for 4 environment workers, the quota is 3"):
        compile_plan(make_tenant("a", rl(1, 4)), service)
    huge = {"action_module": {"type": "gaussian", "hidden_dim": 4096}}
    with pytest.raises(AdmissionError, match=r"takes \d+ bytes .* the quota is 100000000 bytes"):
        compile_plan(make_tenant("a", policy=huge), service)


def test_sharing_names_partners_and_the_fields_that_keep_others_apart(make_tenant, make_service):
    service = make_service(backbones={"lite": {"type": "lite"}, "twin": {"type": "lite"}})
    plans = [
        compile_plan(make_tenant("a"), service),
        compile_plan(make_tenant("b", cameras=["front"], state_dim=3), service),
        compile_plan(make_tenant("c", image_size=[96, 64]), service),
        compile_plan(make_tenant("d", policy={"backbone": "twin"}), service),
    ]
    a, b, c, d = sharing(plans)
    assert (a.shares_with, b.shares_with, c.shares_with, d.shares_with) == (("b",), ("a",), (), ())
    assert a.differs == {"c": {"image_size": ([64, 64], [96, 64])}, "d": {"backbone": ("lite", "twin")}}
    assert c.differs["a"] == {"image_size": ([96, 64], [64, 64])}


def test_items_in_flight_reach_from_one_checkpoint_to_the_next(make_tenant, sft, rl):
    tenant = make_tenant("a", sft(gradient_accumulation=4), rl())
    supervised, reinforced = tenant.workloads
    assert items_in_flight(tenant, supervised) >= 25 * 4
    assert items_in_flight(tenant, reinforced) >= reinforced.rollout.episodes_per_iteration
