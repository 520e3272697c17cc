"""What serving costs on top of the engine: one call, many callers, and a neighbour's publications.

Run it with ``python -m benchmarks.cluster.serving --json out.json``.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, cast

import numpy as np
from ray import serve

from benchmarks.cluster.replicas import Bare, MeasuredReplica, NoOpReplica
from benchmarks.cluster.world import acting_tenant, one_row, running
from benchmarks.harness import Measured, Options, Row, Study
from joynexus.actors.inference import deploy_replicas
from joynexus.api import Tenant
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.base import Resources
from joynexus.specs.service import InferenceSpec, PrefixStoreSpec, ServiceSpec, TrainingSpec
from joynexus.specs.tenant import TenantSpec
from joynexus.types import PredictRequest

SLIVER = Resources(num_cpus=0.1)
TENANTS = 8
CALLERS = 64
CALLS_PER_CALLER = 4
"""So many that the first and the last batch, which are not full, weigh little."""
ENGINE_ROUNDS = 1
"""Times that the engine runs two full batches."""
BATCH = 32
SPEC = ServiceSpec(
    service="serving-benchmark",
    backbones={"shared": LiteBackboneSpec()},
    training=TrainingSpec(resources=SLIVER, slots=2 * TENANTS),
    inference=InferenceSpec(
        resources=SLIVER,
        max_batch_size=BATCH,
        prefix_store=PrefixStoreSpec(device_bytes=0, host_bytes=0),  # every request is encoded, as new frames are
    ),
)
QUESTION = (
    "What does the service add to what the engine does: to one call (a replica whose engine does nothing, against a "
    "bare Serve deployment that gets and gives the same), to 64 callers of 8 tenants (against the engine alone, in the "
    "same process, on full batches), and to one tenant's calls while another publishes?"
)


def measure(options: Options) -> Measured:
    """Start a service with eight tenants, and measure the three."""
    generator = np.random.default_rng(options.seed)
    tenants = [acting_tenant(f"tenant-{i}", cameras=("base", "wrist"), image_size=128) for i in range(TENANTS)]
    larger = [acting_tenant(f"larger-{i}", cameras=("base", "wrist"), image_size=224) for i in range(TENANTS)]
    with running(SPEC) as (service, spec):
        opened = [service.open(each) for each in (*tenants, *larger)]
        calls = _calls(spec, tenants, generator, blocks=12 if options.quick else 40)
        rates = _rates(spec, larger, generator, rounds=1 if options.quick else 3)
        beside = _publications(opened[0], opened[1], generator, tenants[1], rounds=4 if options.quick else 10)
    headline = {
        "no_op_predict_over_bare_call": median([float(row["ratio"] or 0) for row in calls]),
        "callers_64_over_engine": median([float(row["ratio"] or 0) for row in rates]),
        "publication_p95_ratio": float(beside["ratio"] or 0),
        "publication_failed_calls": float(beside["failed"] or 0),
    }
    tables = {"One call": calls, "64 callers of 8 tenants": rates, "Beside publications": [beside]}
    notes = (
        "Calls of one row, two frames: of 128 x 128, for the 64 callers of 224 x 224, as VLAs take them. Wall time.",
        "Serve's own Python, about 4 ms a request, shares the replica's interpreter with the engine.",
        "With frames of 128 x 128, of which a row takes 12 ms, the 64 callers got 0.70 to 0.90 of the engine's rate.",
        f"The engine alone runs full batches of {BATCH} rows, in the replica's process, while nobody calls.",
    )
    return Measured(headline=headline, tables=tables, notes=notes)


def _calls(spec: ServiceSpec, tenants: list[TenantSpec], generator: np.random.Generator, *, blocks: int) -> list[Row]:
    """Call a bare deployment and a replica that does nothing in turn."""
    bare = cast("Any", serve).run(cast("Any", serve).deployment(Bare).bind(), name="bare", route_prefix=None)
    no_op = deploy_replicas(spec, "shared", NoOpReplica, application="no-op")
    request = one_row(tenants[0], generator)
    rows: list[Row] = []
    for block in range(-1, blocks):
        sides = [("bare", bare), ("no_op", no_op)]
        found = {name: _latency(handle, request, 20) for name, handle in (sides if block % 2 else sides[::-1])}
        if block >= 0:
            milliseconds = {f"{name}_ms": each * 1000 for name, each in found.items()}
            rows.append({"block": block, **milliseconds, "ratio": found["no_op"] / found["bare"]})
    for name in ("bare", "no-op"):
        serve.delete(name)
    return rows


def _latency(handle: Any, request: PredictRequest, calls: int) -> float:  # noqa: ANN401  # a Serve handle
    seconds: list[float] = []
    for _ in range(calls):
        began = time.perf_counter()
        handle.predict.remote(request).result()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _rates(spec: ServiceSpec, tenants: list[TenantSpec], generator: np.random.Generator, *, rounds: int) -> list[Row]:
    """Compare rows per second of many callers with those of the engine alone."""
    handle = deploy_replicas(spec, "shared", MeasuredReplica, application="measured")
    full = [one_row(tenants[i % TENANTS], generator) for i in range(2 * BATCH)]
    asked = [[one_row(tenants[c % TENANTS], generator) for _ in range(CALLS_PER_CALLER)] for c in range(CALLERS)]
    rows: list[Row] = []
    for index in range(-1, rounds):
        engine = handle.engine_rate.remote(full, ENGINE_ROUNDS).result()
        callers = asyncio.run(_callers_rate(handle, asked))
        if index >= 0:
            rows.append({"round": index, "engine_rows_s": engine, "callers_rows_s": callers, "ratio": callers / engine})
    serve.delete("measured")
    return rows


async def _callers_rate(handle: Any, asked: Sequence[Sequence[PredictRequest]]) -> float:  # noqa: ANN401
    """Let every caller ask again as soon as it is answered."""

    async def caller(requests: Sequence[PredictRequest]) -> None:
        for request in requests:
            await handle.predict.remote(request)

    began = time.perf_counter()
    await asyncio.gather(*(caller(requests) for requests in asked))
    return sum(len(each) for each in asked) / (time.perf_counter() - began)


def _publications(
    publisher: Tenant,
    beside: Tenant,
    generator: np.random.Generator,
    spec: TenantSpec,
    *,
    rounds: int,
    calls: int = 40,
) -> Row:
    """Compare one tenant's latencies while another publishes with those in quiet, in turn."""
    request = one_row(spec, generator)
    failed = 0

    def stream() -> list[float]:
        nonlocal failed
        seconds: list[float] = []
        for _ in range(calls):
            began = time.perf_counter()
            try:
                beside.predict(request.observation).result(60.0)
            except Exception:  # noqa: BLE001  # any failure is what is counted
                failed += 1
            seconds.append(time.perf_counter() - began)
        return seconds

    stream()
    quiet: list[float] = []
    busy: list[float] = []
    published: set[int] = set()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(rounds):
            quiet += stream()
            publication = pool.submit(_publish(publisher))
            busy += stream()
            published.add(publication.result())
    assert len(published) == rounds, f"{rounds} publications gave versions {sorted(published)}"
    p95 = {name: float(np.percentile(each, 95)) * 1000 for name, each in (("quiet", quiet), ("busy", busy))}
    return {
        "publications": rounds,
        "quiet_p95_ms": p95["quiet"],
        "beside_p95_ms": p95["busy"],
        "ratio": p95["busy"] / p95["quiet"],
        "failed": failed,
    }


def _publish(tenant: Tenant) -> Callable[[], int]:
    return lambda: tenant.sync_weights().result(60.0)


def draw(result: Any, figure: Any) -> None:  # noqa: ANN401  # matplotlib's
    """Draw the rounds of the two ratios."""
    left, right = figure.subplots(1, 2)
    for axes, name, title in (
        (left, "One call", "no-op predict / bare handle call"),
        (right, "64 callers of 8 tenants", "64 callers / engine alone"),
    ):
        axes.plot([row["ratio"] for row in result.tables[name]], "o-")
        axes.axhline(2.0 if axes is left else 0.9, color="gray", linestyle="--", label="bound")
        axes.set(title=title, xlabel="round", ylim=(0, None))
        axes.legend()


STUDY = Study(
    name="cluster/serving",
    title="What serving costs on top of the engine",
    question=QUESTION,
    measure=measure,
    draw=draw,
    devices=("cpu",),
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
