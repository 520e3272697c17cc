import pytest

from joynexus.errors import SpecError
from joynexus.scheduling.plan import compile_plan
from joynexus.scheduling.sharing import sharing
from joynexus.testing.tiny import TINY_SMOLVLM

ADAPTER = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


@pytest.fixture
def service(make_service):
    return make_service(backbones={"tiny": TINY_SMOLVLM.model_dump(mode="json"), "lite": {"type": "lite"}})


def test_the_plan_tells_what_an_adapter_costs(make_tenant, service, sft):
    plain, adapted = (
        compile_plan(make_tenant(name, sft(), policy={"backbone": "tiny", "adapter": adapter}), service)
        for name, adapter in (("a", None), ("b", ADAPTER))
    )
    assert plain.adapter is None
    assert adapted.adapter is not None
    assert adapted.adapter.parameters == 2 * 4 * ((32 + 32) + (32 + 16))
    assert adapted.adapter.module == 16 * adapted.adapter.parameters
    assert not adapted.adapter.reuses_prefixes
    assert adapted.memory.module == plain.memory.module + adapted.adapter.module
    assert adapted.memory.activations == plain.memory.activations + adapted.adapter.activations > 0
    assert adapted.module_parameters == plain.module_parameters
    assert sharing([plain, adapted])[0].shares_with == ("b",)


def test_targets_that_the_backbone_lacks_are_refused(make_tenant, service, sft):
    wrong = make_tenant("a", sft(), policy={"backbone": "tiny", "adapter": {**ADAPTER, "targets": ["qkv"]}})
    with pytest.raises(
        SpecError, match=r"'tiny' \(smolvlm\) has no layers \['qkv'\]. Use some of \['q_proj', 'k_proj',"
    ):
        compile_plan(wrong, service)
    with pytest.raises(SpecError, match=r"'lite' \(lite\) has no layers .* Leave 'adapter' out, or take a vision-"):
        compile_plan(make_tenant("a", sft(), policy={"adapter": ADAPTER}), service)


def test_an_adapter_shares_no_prefixes(make_tenant):
    assert make_tenant("a").policy.shares_prefixes
    assert not make_tenant("a", policy={"adapter": ADAPTER}).policy.shares_prefixes
    assert not make_tenant("a", policy={"reuse_prefixes": False}).policy.shares_prefixes
