"""Whatever requests wait at the same time, each gets what it gets alone: actions, scores, traces, errors."""

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_scenarios import (
    Ask,
    Stream,
    Tenant,
    alone,
    asks,
    bound_of,
    compare,
    request_of,
    serve,
    snapshot,
    streams,
)
from training_world import blas_is_row_invariant

from joynexus.errors import JoyNexusError
from joynexus.queues.inference_queue import GroupBatcher
from joynexus.specs.service import InferenceSpec
from joynexus.types import PredictRequest

pytestmark = pytest.mark.timeout(300)  # many small runs, on a busy machine

FOUR = tuple(Tenant(f"t{index}", "gaussian", (None, 0.5)[index % 2], 12) for index in range(4))
PLAIN = Ask(0, 0, 1, deterministic=False, asks_base=False, fault=None, publishes=False)


@cache
def is_exact() -> bool:
    """Probe: whether a row is rounded alike wherever it stands among others."""
    draw = torch.Generator().manual_seed(0)
    for width in (3, 4, 16, 32, 64):
        weight, rows = torch.randn(width, 16, generator=draw), torch.randn(4, width, generator=draw)
        if not torch.equal((rows @ weight).flip(0), rows.flip(0) @ weight):
            return False
    return blas_is_row_invariant()


@settings(settings.get_profile("exactness"), max_examples=15)
@given(stream=streams, mode=st.sampled_from(["auto", "auto", "always", "never"]))
def test_each_request_gets_among_others_what_it_gets_alone(stream: Stream, mode: str) -> None:
    store = {"device_bytes": stream.store_bytes, "host_bytes": 0}
    engine, tenants = serve(stream.tenants, prefix_store=store, stack_heads=mode), stream.tenants
    newest = dict.fromkeys(tenants, 1)
    for group in stream.groups:
        chosen = [(tenants[ask.tenant % len(tenants)], ask) for ask in group]
        for tenant, ask in chosen:
            if ask.publishes:
                newest[tenant] += 1
                engine.set_policy(snapshot(tenant, newest[tenant]))
        answers = engine.predict([request_of(tenant, ask) for tenant, ask in chosen])
        for (tenant, ask), answer in zip(chosen, answers, strict=True):
            want = alone(tenant, replace(ask, publishes=False), newest[tenant])
            compare(answer, want, is_exact=is_exact() and mode != "always", bound=bound_of(mode))


class Comes:
    """Requests that come at random pauses of a prediction, and their answers."""

    def __init__(self, at: dict[int, list[PredictRequest]]) -> None:
        self._at = at
        self._pauses = 0
        self.answers: dict[int, list[Any]] = {}

    def take(self) -> list[PredictRequest]:
        self._pauses += 1
        return self._at.get(self._pauses - 1, [])

    def give(self, answers: list[Any]) -> None:
        self.answers[self._pauses - 1] = list(answers)


@settings(settings.get_profile("exactness"), max_examples=15)
@given(
    stream=streams,
    urgent=st.dictionaries(st.integers(0, 15), st.lists(asks, min_size=1, max_size=3), max_size=4),
    mode=st.sampled_from(["auto", "always", "never"]),
)
def test_each_request_gets_the_same_in_the_middle_of_others_and_around_them(
    stream: Stream, urgent: dict[int, list[Ask]], mode: str
) -> None:
    store = {"device_bytes": stream.store_bytes, "host_bytes": 0}
    engine, tenants = serve(stream.tenants, prefix_store=store, stack_heads=mode), stream.tenants

    def whose(ask: Ask) -> tuple[Tenant, Ask]:
        return tenants[ask.tenant % len(tenants)], replace(ask, publishes=False)

    for group in stream.groups:
        comes = Comes({pause: [request_of(*whose(ask)) for ask in each] for pause, each in urgent.items()})
        answers = engine.predict([request_of(*whose(ask)) for ask in group], comes)
        found = [*zip(group, answers, strict=True)]
        for pause, given_back in comes.answers.items():
            found += zip(urgent[pause], given_back, strict=True)
        for ask, answer in found:
            want = alone(*whose(ask), 1)
            compare(answer, want, is_exact=is_exact() and mode != "always", bound=bound_of(mode))


@settings(settings.get_profile("exactness"), max_examples=8)
@given(
    group=st.lists(st.tuples(asks, st.sampled_from(["waits", "waits", "gives up", "gives up late"])), max_size=10),
    rows=st.sampled_from([4, 32]),
)
def test_callers_that_give_up_change_nothing_for_the_others(group: list[tuple[Ask, str]], rows: int) -> None:
    engine = serve(FOUR)
    batcher = GroupBatcher(engine.predict, engine.signature_of, InferenceSpec(max_batch_size=rows, max_wait_ms=1.0))

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(batcher.submit(request_of(FOUR[ask.tenant % 4], ask))) for ask, _ in group]
        await asyncio.sleep(0)
        for task, (_, habit) in zip(tasks, group, strict=True):
            if habit == "gives up":
                task.cancel()
        await asyncio.sleep(0.002)
        for task, (_, habit) in zip(tasks, group, strict=True):
            if habit == "gives up late":  # while the batch runs, or after it
                task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await batcher.aclose()
        return answers

    for (ask, habit), answer in zip(group, asyncio.run(main()), strict=True):
        if habit == "waits" and ask.fault != "unknown":  # the batcher itself turns those away
            want = alone(FOUR[ask.tenant % 4], replace(ask, publishes=False), 1)
            compare(answer, want, is_exact=is_exact())


@pytest.mark.parametrize("module", ["oft", "gaussian", "flow_matching", "diffusion", "discrete_tokens"])
@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_like_modules_of_many_tenants_act_as_one_where_that_is_allowed(module: str, mode: str) -> None:
    """Ragged rows, a publication between two groups, a neighbour that falls silent, and one that is removed."""
    tenants = [replace(each, module=module) for each in FOUR]
    engine = serve(tenants, stack_heads=mode)
    newest = dict.fromkeys(tenants, 1)
    for step, present in enumerate((tenants, tenants, tenants[:2], tenants)):
        newest[tenants[0]] = step + 1
        engine.set_policy(snapshot(tenants[0], step + 1))
        chosen = [(tenant, replace(PLAIN, content=step, rows=(1, 6, 4, 9)[i])) for i, tenant in enumerate(present)]
        answers = engine.predict([request_of(*each) for each in chosen])
        for (tenant, ask), answer in zip(chosen, answers, strict=True):
            want = alone(tenant, ask, newest[tenant])
            compare(answer, want, is_exact=is_exact() and mode != "always", bound=bound_of(mode))
    stacks = engine._heads
    if mode == "never":
        assert (stacks.num_stacked, stacks.nbytes) == (0, 0)
    elif mode == "always":
        assert stacks.num_stacked >= 3
    else:
        assert (stacks.num_stacked > 0) == any(stacks._verdicts.values())


def test_a_stack_forgets_a_tenant_that_is_removed() -> None:
    engine = serve(FOUR, stack_heads="always")
    engine.predict([request_of(tenant, PLAIN) for tenant in FOUR])
    (stack,) = engine._heads._stacks.values()
    seated = [None if each is None else each.tenant for each in stack._seated]
    slot = seated.index("t2")
    assert any(bool(each[slot].any()) for each in stack._module.views.values())
    engine.remove_policy("t2")
    assert not any(bool(each[slot].any()) for each in stack._module.views.values())
    answers = engine.predict([request_of(tenant, PLAIN) for tenant in FOUR])
    assert [isinstance(each, JoyNexusError) for each in answers] == [False, False, True, False]
    for tenant in FOUR:
        engine.remove_policy(tenant.name)
    assert engine._heads.nbytes == 0


def test_a_version_that_nobody_asks_for_loses_its_slot() -> None:
    engine = serve(FOUR, stack_heads="always")
    engine.predict([request_of(tenant, PLAIN) for tenant in FOUR])
    for _ in range(20):
        engine.predict([request_of(tenant, PLAIN) for tenant in FOUR[:3]])
    (stack,) = engine._heads._stacks.values()
    assert [each.tenant for each in stack._seated] == ["t0", "t1", "t2"]


def test_a_module_that_fails_in_a_stack_fails_its_own_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve(FOUR, stack_heads="always")
    engine.predict([request_of(tenant, PLAIN) for tenant in FOUR])
    (stack,) = engine._heads._stacks.values()

    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("no memory for so many")

    monkeypatch.setattr(stack._module, "act", fails)
    answers = engine.predict([request_of(tenant, PLAIN) for tenant in FOUR])
    for tenant, answer in zip(FOUR, answers, strict=True):
        compare(answer, alone(tenant, PLAIN, 1), is_exact=is_exact())
