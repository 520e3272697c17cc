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

import joynexus
from benchmarks.cluster.replicas import Bare, MeasuredReplica
from benchmarks.cluster.world import acting_tenant, local_ray, one_row
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
"""So many that the first and the last batch, which are not full, weigh little; one less in a quick run."""
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
    """Start a service with eight tenants, and two with smaller frames; and measure the three."""
    quick, generator = options.quick, np.random.default_rng(options.seed)
    small = [acting_tenant(f"small-{i}", cameras=("base", "wrist"), image_size=128) for i in range(2)]
    large = [acting_tenant(f"large-{i}", cameras=("base", "wrist"), image_size=224) for i in range(TENANTS)]
    with local_ray(SPEC, num_cpus=2) as spec, ThreadPoolExecutor(TENANTS + 1) as pool:
        cast("Any", serve).start(proxy_location="Disabled")
        deploying = pool.submit(_deploy, spec)  # loads a backbone, as the service does beside it
        service = joynexus.start(spec, root=spec.storage.root)
        publisher, beside, *_ = pool.map(service.open, (*small, *large))
        bare, replica = deploying.result()
        calls = _calls(bare, replica, one_row(small[0], generator), blocks=10 if quick else 40)
        rates = _rates(replica, large, generator, rounds=1 if quick else 3, calls=CALLS_PER_CALLER - quick)
        quiet = _publications(publisher, beside, one_row(small[1], generator), rounds=3 if quick else 10)
    headline = {
        "no_op_predict_over_bare_call": median([float(row["ratio"] or 0) for row in calls]),
        "callers_64_over_engine": median([float(row["ratio"] or 0) for row in rates]),
        "publication_p95_ratio": float(quiet["ratio"] or 0),
        "publication_failed_calls": float(quiet["failed"] or 0),
    }
    tables = {"One call": calls, "64 callers of 8 tenants": rates, "Beside publications": [quiet]}
    notes = (
        "Calls of one row, two frames: of 128 x 128, for the 64 callers of 224 x 224, as VLAs take them. Wall time.",
        "Serve's own Python, about 4 ms a request, shares the replica's interpreter with the engine.",
        "With frames of 128 x 128, of which a row takes 12 ms, the 64 callers got 0.70 to 0.90 of the engine's rate.",
        "Publications: both the service's replica, which is called, and the one that is measured take them over.",
        f"The engine alone runs full batches of {BATCH} rows, in the replica's process, while nobody calls.",
    )
    return Measured(headline=headline, tables=tables, notes=notes)


def _deploy(spec: ServiceSpec) -> tuple[Any, Any]:
    """Deploy what does nothing, and the replica to measure; returns their handles."""
    bare = cast("Any", serve).run(cast("Any", serve).deployment(Bare).bind(), name="bare", route_prefix=None)
    return bare, deploy_replicas(spec, "shared", MeasuredReplica, application="measured")


def _calls(bare: Any, replica: Any, request: PredictRequest, *, blocks: int) -> list[Row]:  # noqa: ANN401  # handles
    """Call the bare deployment and the replica, whose engine does nothing, in turn."""
    replica.switch.remote(works=False).result()
    rows: list[Row] = []
    for block in range(-1, blocks):
        sides = [("bare", bare), ("no_op", replica)]
        found = {name: _latency(handle, request, 20) for name, handle in (sides if block % 2 else sides[::-1])}
        if block >= 0:
            milliseconds = {f"{name}_ms": each * 1000 for name, each in found.items()}
            rows.append({"block": block, **milliseconds, "ratio": found["no_op"] / found["bare"]})
    replica.switch.remote(works=True).result()
    return rows


def _latency(handle: Any, request: PredictRequest, calls: int) -> float:  # noqa: ANN401  # a Serve handle
    seconds: list[float] = []
    for _ in range(calls):
        began = time.perf_counter()
        handle.predict.remote(request).result()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _rates(
    replica: Any,  # noqa: ANN401  # a handle
    tenants: Sequence[TenantSpec],
    generator: np.random.Generator,
    *,
    rounds: int,
    calls: int,
) -> list[Row]:
    """Compare rows per second of many callers with those of the engine alone."""
    full = [one_row(tenants[i % TENANTS], generator) for i in range(2 * BATCH)]
    asked = [[one_row(tenants[c % TENANTS], generator) for _ in range(calls)] for c in range(CALLERS)]
    asyncio.run(_callers_rate(replica, [each[:1] for each in asked[:BATCH]]))  # not counted: every size is new
    rows: list[Row] = []
    for index in range(rounds):
        engine = replica.engine_rate.remote(full).result()
        callers = asyncio.run(_callers_rate(replica, asked))
        rows.append({"round": index, "engine_rows_s": engine, "callers_rows_s": callers, "ratio": callers / engine})
    return rows


async def _callers_rate(handle: Any, asked: Sequence[Sequence[PredictRequest]]) -> float:  # noqa: ANN401
    """Let every caller ask again as soon as it is answered."""

    async def caller(requests: Sequence[PredictRequest]) -> None:
        for request in requests:
            await handle.predict.remote(request)

    began = time.perf_counter()
    await asyncio.gather(*(caller(requests) for requests in asked))
    return sum(len(each) for each in asked) / (time.perf_counter() - began)


def _publications(publisher: Tenant, beside: Tenant, request: PredictRequest, *, rounds: int, calls: int = 40) -> Row:
    """Compare one tenant's latencies while another publishes with those in quiet, in turn."""
    failed = 0

    def stream(calls: int = calls) -> list[float]:
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

    stream(10)
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
