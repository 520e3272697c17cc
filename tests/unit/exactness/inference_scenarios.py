"""Random streams of requests and publications of many tenants, and what each request gets alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from training_world import backbone, observation, policy, policy_stats

from joynexus.errors import JoyNexusError
from joynexus.inference.engine import InferenceEngine
from joynexus.models.policy import build_policy
from joynexus.models.stacked import STACK_BOUND
from joynexus.specs.service import InferenceSpec
from joynexus.testing.action_module_contracts import shake
from joynexus.types import ActionChunk, Array, PolicySnapshot, PredictRequest

NO_STORE: Mapping[str, Any] = {"device_bytes": 0, "host_bytes": 0}
VERSIONS = 3


@dataclass(frozen=True)
class Tenant:
    """Whose policy it is."""

    name: str
    module: str
    shift: float | None
    """Of its normalisation statistics; None for none."""
    tokens: int


@dataclass(frozen=True)
class Ask:
    """One request, or with ``publishes`` a publication before it."""

    tenant: int
    content: int
    """Requests of the same content see the same frames."""
    rows: int
    deterministic: bool
    asks_base: bool
    fault: str | None
    publishes: bool


@dataclass(frozen=True)
class Stream:
    """Tenants, and groups of requests."""

    tenants: tuple[Tenant, ...]
    groups: tuple[tuple[Ask, ...], ...]
    store_bytes: int


asks = st.builds(
    Ask,
    tenant=st.integers(0, 4),
    content=st.integers(0, 4),
    rows=st.sampled_from([1, 1, 2, 3, 5, 9]),
    deterministic=st.sampled_from([False, False, True]),
    asks_base=st.sampled_from([False, False, False, True]),
    fault=st.sampled_from([None, None, None, None, "nan", "seeds", "prompt", "unknown"]),
    publishes=st.sampled_from([False, False, True]),
)


def _tenants(modules: Sequence[str], shifts: Sequence[float | None], tokens: Sequence[int]) -> tuple[Tenant, ...]:
    return tuple(Tenant(f"t{i}", *each) for i, each in enumerate(zip(modules, shifts, tokens, strict=False)))


kinds = st.sampled_from(["oft", "gaussian", "flow_matching", "diffusion", "discrete_tokens"])
streams = st.builds(
    Stream,
    tenants=st.builds(
        _tenants,
        modules=st.one_of(st.lists(kinds, min_size=1, max_size=5), kinds.map(lambda kind: [kind] * 4)),
        shifts=st.lists(st.sampled_from([None, 0.0, 0.5]), min_size=5, max_size=5),
        tokens=st.lists(st.sampled_from([12, 12, 12, 11]), min_size=5, max_size=5),
    ),
    groups=st.lists(st.lists(asks, min_size=1, max_size=7).map(tuple), min_size=1, max_size=4).map(tuple),
    store_bytes=st.sampled_from([0, 6000, 1 << 20]),
)


@cache
def snapshot(tenant: Tenant, version: int) -> PolicySnapshot:
    """A version whose parameters have all been moved off their initial values, those of each tenant otherwise."""
    spec = policy(tenant.module, tokens=tenant.tokens, normalization="identity" if tenant.shift is None else "mean_std")
    stats = None if tenant.shift is None else policy_stats(shift=tenant.shift)
    seed = int(tenant.name[1:]) + 10 * version
    parts = build_policy(spec, backbone(), seed=seed, stats=stats)
    shake(parts.module)
    parameters = {name: each.detach().numpy().copy() for name, each in parts.module.state_dict().items()}
    return PolicySnapshot(
        tenant=tenant.name, version=version, policy=spec, parameters=parameters, stats=stats, seed=seed
    )


def request_of(tenant: Tenant, ask: Ask) -> PredictRequest:
    """Make the request that ``ask`` stands for."""
    seen = observation(ask.rows, np.random.default_rng(ask.content))
    request = PredictRequest(
        tenant=tenant.name,
        observation=seen,
        seeds=tuple(100 * ask.content + row for row in range(ask.rows)),
        deterministic=ask.deterministic,
        version=0 if ask.asks_base else None,
    )
    if ask.fault == "nan":
        seen.state[0, 0] = np.nan
    if ask.fault == "seeds":
        return replace(request, seeds=(*request.seeds, 1))
    if ask.fault == "prompt":
        long = ("far too long a prompt for a dozen tokens",) * ask.rows
        return replace(request, observation=replace(seen, instructions=long))
    return replace(request, tenant="nobody") if ask.fault == "unknown" else request


def serve(tenants: Sequence[Tenant], **spec: Any) -> InferenceEngine:
    """An engine with every tenant's base and its first version."""
    engine = InferenceEngine(backbone(), InferenceSpec(**spec), backbone_name="tiny")
    for tenant in tenants:
        for version in (0, 1):
            engine.set_policy(snapshot(tenant, version))
    return engine


@cache
def alone(tenant: Tenant, ask: Ask, version: int) -> ActionChunk | JoyNexusError:
    """The answer where nobody else is, nothing is kept and no modules are stacked."""
    engine = serve([tenant], prefix_store=NO_STORE, stack_heads="never")
    engine.set_policy(snapshot(tenant, version))
    (answer,) = engine.predict([request_of(tenant, ask)])
    return answer


def compare(
    got: ActionChunk | JoyNexusError, want: ActionChunk | JoyNexusError, *, is_exact: bool, bound: float = 1e-6
) -> None:
    """Check that two answers are the same: to the bit, or within a bound relative to 1 + the size of a number."""
    if not isinstance(want, ActionChunk):
        assert (type(got), str(got)) == (type(want), str(want))
        return
    assert isinstance(got, ActionChunk), got
    assert got.policy_version == want.policy_version
    mine, theirs = _arrays(got), _arrays(want)
    assert mine.keys() == theirs.keys()
    for name, each in theirs.items():
        if is_exact:
            assert np.array_equal(mine[name], each), (name, np.abs(mine[name] - each).max())
        assert np.all(np.abs(mine[name] - each) <= bound * (1 + np.abs(each))), name


def bound_of(mode: str) -> float:
    """How far an answer may be off where this machine's kernels are not exact."""
    return STACK_BOUND if mode == "always" else 1e-6


def _arrays(chunk: ActionChunk) -> dict[str, Array]:
    named = {"actions": chunk.actions, "log_prob": chunk.log_prob, "value": chunk.value, **chunk.trace}
    return {name: each for name, each in named.items() if each is not None}
