"""Random lives of training tenants, and what each of them comes to, beside others or alone."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from training_world import (
    ACTION_DIM,
    FAST,
    HORIZON,
    SUPERVISED,
    assert_same,
    backbone,
    batch,
    drain,
    engine,
    policy,
    policy_stats,
    with_arrays,
)

from joynexus.errors import InvalidBatchError
from joynexus.models.action_module import ActionModule
from joynexus.models.policy import prepare_prefix
from joynexus.models.prefix import to_arrays
from joynexus.specs.signature import prefix_layout
from joynexus.specs.tenant import PolicySpec
from joynexus.testing.model_inputs import UNCHANGED
from joynexus.training.engine import TrainingEngine
from joynexus.training.losses import LOSSES, LossFunction, LossInputs, LossRows
from joynexus.types import Array, Loss, TrainingBatch, TrainingCall, TrainingResult

GOOD = ("train", "forward", "step", "train", "weighted", "ppo", "carried", "partly_carried")
BAD = ("nan", "raises", "infinite_gradient", "refused", "bad_features", "masked", "closing")
NO_STORE: Mapping[str, Any] = {"device_bytes": 0, "host_bytes": 0}
ROW_BYTES = 3000
"""About what the features of one row take."""


@dataclass(frozen=True)
class Move:
    """One call of a tenant."""

    kind: str
    rows: int
    content: int
    """Tenants that take the same content see the same frames."""


@dataclass(frozen=True)
class Plan:
    """One tenant's life."""

    module: str
    seed: int
    shift: float | None
    """Of its normalisation statistics; None for none."""
    tokens: int
    """Tenants of other token buckets have another signature."""
    moves: tuple[Move, ...]
    closes_at: int | None
    """Its slot is closed once it has submitted so many calls, or inside of a neighbour's loss; None: never."""

    @property
    def policy(self) -> PolicySpec:
        return policy(self.module, tokens=self.tokens, normalization="identity" if self.shift is None else "mean_std")


@dataclass(frozen=True)
class Scenario:
    """Tenants, and the order in which they submit and the engine steps."""

    plans: tuple[Plan, ...]
    order: tuple[int, ...]
    """Tenant ``i % n`` submits; a number that ``STEP_EVERY`` divides makes the engine step."""
    store_rows: int
    max_group: int


STEP_EVERY = 4

moves = st.builds(
    Move,
    kind=st.one_of(st.sampled_from(GOOD), st.sampled_from(GOOD + BAD)),
    rows=st.integers(1, 5),
    content=st.integers(0, 3),
)
plans = st.builds(
    Plan,
    module=st.sampled_from(["oft", "gaussian", "flow_matching", "diffusion", "discrete_tokens"]),
    seed=st.integers(0, 2),
    shift=st.sampled_from([None, 0.0, 0.5]),
    tokens=st.sampled_from([12, 12, 12, 11]),
    moves=st.lists(moves, min_size=1, max_size=4).map(tuple),
    closes_at=st.sampled_from([None, None, None, 1, 2]),
)
scenarios = st.builds(
    Scenario,
    plans=st.lists(plans, min_size=1, max_size=5).map(tuple),
    order=st.lists(st.integers(0, 19), max_size=16).map(tuple),
    store_rows=st.sampled_from([0, 1, 3, 1000]),
    max_group=st.sampled_from([5, 256]),
)


@dataclass
class Outcome:
    """What became of a tenant."""

    answers: list[tuple[str, Any]] = field(default_factory=list)
    state: dict[str, Array] | None = None
    """None where its slot was closed."""


class Run:
    """One engine, and tenants that live in it."""

    def __init__(self, plans: Mapping[str, Plan], *, store: Mapping[str, Any], max_group: int = 256) -> None:
        self.engine = engine(prefix_store=dict(store), max_group_samples=max_group)
        self._plans = dict(plans)
        self._submitted = dict.fromkeys(plans, 0)
        self._sequence = dict.fromkeys(plans, 0)
        self._futures: dict[str, list[Future[TrainingResult] | Exception]] = {tenant: [] for tenant in plans}
        self._open = set(plans)
        for tenant, plan in plans.items():
            stats = None if plan.shift is None else policy_stats(shift=plan.shift)
            self.engine.open_slot(tenant, plan.policy, seed=plan.seed, stats=stats)

    def submit(self, tenant: str) -> bool:
        """Let a tenant make its next move; False where it has none."""
        plan, done = self._plans[tenant], self._submitted[tenant]
        if tenant not in self._open or done == len(plan.moves):
            return False
        self._submitted[tenant] += 1
        try:
            call = call_of(tenant, self._sequence[tenant], plan, plan.moves[done])
            self._futures[tenant].append(self.engine.submit(call))
            self._sequence[tenant] += 1
        except InvalidBatchError as error:
            self._futures[tenant].append(error)
        if plan.closes_at == done + 1:
            self.close(tenant)
        return True

    def close(self, tenant: str) -> None:
        self._open.discard(tenant)
        self.engine.close_slot(tenant)

    def close_one(self) -> None:
        """Close a slot from inside of a neighbour's loss."""
        for tenant in sorted(self._open):
            if self._plans[tenant].closes_at is not None:
                self.close(tenant)
                return

    def finish(self) -> dict[str, Outcome]:
        for tenant in self._plans:
            while self.submit(tenant):
                pass
        drain(self.engine)
        return {
            tenant: Outcome(
                answers=[_answer(each) for each in self._futures[tenant]],
                state=everything(self.engine, tenant) if tenant in self._open else None,
            )
            for tenant in self._plans
        }


def together(scenario: Scenario, after_open: Callable[[Run], None] = lambda _: None) -> dict[str, Outcome]:
    """Run all tenants of a scenario in one engine."""
    names = [f"tenant-{index}" for index in range(len(scenario.plans))]
    store = {"device_bytes": scenario.store_rows * ROW_BYTES, "host_bytes": 0}
    run = Run(dict(zip(names, scenario.plans, strict=True)), store=store, max_group=scenario.max_group)
    after_open(run)
    for number in scenario.order:
        if number % STEP_EVERY == 0:
            run.engine.step()
        else:
            run.submit(names[number % len(names)])
    return run.finish()


def alone(scenario: Scenario) -> dict[str, Outcome]:
    """Run each tenant in an engine of its own that keeps no features; nobody closes its slot."""
    found: dict[str, Outcome] = {}
    for index, plan in enumerate(scenario.plans):
        tenant = f"tenant-{index}"
        found |= Run({tenant: replace(plan, closes_at=None)}, store=NO_STORE).finish()
    return found


def compare(mine: Outcome, expected: Outcome) -> None:
    """Check that a tenant got beside others what it gets alone, as far as it was let to live."""
    for got, want in zip(mine.answers, expected.answers, strict=False):
        if mine.state is None and got[0] == "TenantNotFoundError":
            continue
        assert got[0] == want[0], (got, want)
        if isinstance(want[1], dict):
            assert_same(got[1], want[1])
        else:
            assert got[1] == want[1]
    if mine.state is not None:
        assert expected.state is not None
        assert len(mine.answers) == len(expected.answers)
        assert_same(mine.state, expected.state)


def everything(trainer: TrainingEngine, tenant: str) -> dict[str, Array]:
    """All that a slot holds, and training changes."""
    state = trainer._slot(tenant).state
    found = {f"parameter/{name}": each.detach().numpy().copy() for name, each in state.parameters.items()}
    found |= {name: each.numpy().copy() for name, each in state.optimizer.tensors().items()}
    found |= {f"gradient/{name}": each.numpy().copy() for name, each in state.accumulated.gradient.items()}
    counters = [state.accumulated.rows, state.optimizer_steps, state.schedule_step]
    generator = state.generator.get_state().numpy().astype(np.float64)
    return found | {"generator": generator, "counters": np.array(counters, dtype=np.float64)}


def call_of(tenant: str, sequence: int, plan: Plan, move: Move) -> TrainingCall:
    """Make the call that a move stands for."""
    if move.kind == "step":
        return TrainingCall(tenant=tenant, sequence=sequence, optimizer=FAST)
    loss, data = _payload(plan, move)
    optimizer = None if move.kind in ("forward", "partly_carried") else FAST
    return TrainingCall(tenant=tenant, sequence=sequence, batch=data, loss=loss, optimizer=optimizer)


TRACES: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], tuple[str, Array]]] = {
    "gaussian": lambda draw, shape: ("pre_tanh", draw.standard_normal(shape).astype(np.float32)),
    "discrete_tokens": lambda draw, shape: ("tokens", draw.integers(0, 8, shape)),
}
"""What the modules that give log-probabilities would have noted of a decision."""


def _payload(plan: Plan, move: Move) -> tuple[Loss, TrainingBatch]:
    data = batch(move.rows, move.content)
    draw = np.random.default_rng(move.content)
    numbers = {
        name: draw.standard_normal(move.rows).astype(np.float32) for name in ("weights", "advantages", "returns")
    }
    if move.kind == "weighted":
        return Loss(name="weighted"), with_arrays(data, extras={"weights": numbers["weights"]})
    if move.kind == "ppo" and plan.module in TRACES:
        name, trace = TRACES[plan.module](draw, (move.rows, HORIZON, ACTION_DIM))
        extras = {"advantages": numbers["advantages"], "returns": numbers["returns"], f"trace/{name}": trace}
        extras |= {"old_log_prob": -8 + numbers["weights"], "old_value": numbers["weights"]}
        return Loss(name="ppo"), with_arrays(data, extras=extras)
    if move.kind in ("carried", "partly_carried", "bad_features"):
        return SUPERVISED, _with_features(data, plan, move)
    if move.kind == "nan":
        data.observation.state[-1, 0] = np.nan
    if move.kind == "refused":
        return SUPERVISED, with_arrays(data, extras={"weights": numbers["weights"]})
    if move.kind == "masked":
        return SUPERVISED, with_arrays(data, extras={"valid": np.zeros(move.rows, dtype=np.bool_)})
    return (Loss(name=move.kind) if move.kind in LOSSES else SUPERVISED), data


def _with_features(data: TrainingBatch, plan: Plan, move: Move) -> TrainingBatch:
    """The same rows, some of them with their features; a tenant may also bring broken ones."""
    features = to_arrays(_features(plan.tokens, move.rows, move.content))
    if move.kind == "bad_features":
        features.arrays["hidden"][0] = np.nan
    featured = np.arange(move.rows) % 2 == 0 if move.kind == "partly_carried" else None
    return replace(data, features=features, featured=featured)


@cache
def _features(tokens: int, rows: int, content: int) -> Any:
    seen, spec = batch(rows, content).observation, policy(tokens=tokens)
    signature = prefix_layout(backbone().spec, spec.observation).signature
    return backbone().prefix(prepare_prefix(backbone(), spec, seen, UNCHANGED), signature)


def _answer(future: "Future[TrainingResult] | Exception") -> tuple[str, Any]:
    error = future if isinstance(future, Exception) else future.exception(timeout=0)
    if error is not None:
        return type(error).__name__, str(error)
    assert isinstance(future, Future)
    result = future.result(timeout=0)
    counts = {"optimizer_steps": np.array(float(result.optimizer_steps))}
    return "result", counts | {name: np.array(value) for name, value in result.metrics.items()}


def faulty_losses(run: Callable[[], Run | None]) -> dict[str, LossFunction]:
    """Losses with faults; each draws from the tenant's generator first, so that a leaking draw would show."""

    def raises(module: ActionModule, inputs: LossInputs, parameters: Mapping[str, float]) -> LossRows:
        torch.rand(3, generator=inputs.generator)
        raise RuntimeError("a bug in the tenant's own loss")

    def infinite_gradient(module: ActionModule, inputs: LossInputs, parameters: Mapping[str, float]) -> LossRows:
        rows = module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator)
        return LossRows(loss=(rows - rows.detach()).sqrt())  # value 0, slope infinite

    def closing(module: ActionModule, inputs: LossInputs, parameters: Mapping[str, float]) -> LossRows:
        rows = module.loss(inputs.prefix, inputs.state, inputs.actions, inputs.steps, inputs.generator)
        inputs.prefix.hidden.data.zero_()  # past autograd's own guard
        running = run()
        if running is not None:
            running.close_one()
        return LossRows(loss=rows)

    named: Sequence[Any] = (raises, infinite_gradient, closing)
    return {each.__name__: LossFunction(compute=each) for each in named}
