"""What another tenant feels of a flood: one keeps 300 requests waiting, one asks now and then.

Run it with ``python -m benchmarks.cluster.flood --json out.json``.
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, cast

import numpy as np
from ray import serve

import joynexus
from benchmarks.cluster.replicas import MeasuredReplica
from benchmarks.cluster.world import acting_tenant, local_ray, one_row
from benchmarks.harness import Measured, Options, Row, Study
from joynexus.actors.inference import deploy_replicas
from joynexus.specs.backbone import LiteBackboneSpec
from joynexus.specs.base import Resources
from joynexus.specs.service import InferenceSpec, PrefixStoreSpec, ServiceSpec, TrainingSpec
from joynexus.types import PredictRequest

SLIVER = Resources(num_cpus=0.1)
FLOOD = 300
"""Requests that one tenant keeps waiting."""
PERIOD_S = 0.25
"""From one request of the other to its next, give or take a tenth."""
FRAME = 224
SPEC = ServiceSpec(
    service="flood-benchmark",
    backbones={"shared": LiteBackboneSpec()},
    training=TrainingSpec(resources=SLIVER, slots=2),
    inference=InferenceSpec(
        resources=SLIVER,
        prefix_store=PrefixStoreSpec(device_bytes=0, host_bytes=0),  # every request is encoded, as new frames are
    ),
)
SIDES = ("quiet", "beside a flood", "beside a flood that does not give way")
QUESTION = (
    f"One tenant keeps {FLOOD} requests waiting at a replica. How long does another wait, who asks {1 / PERIOD_S:.0f} "
    "times a second, against when it has the replica to itself? With and without putting the flood's batches aside "
    "between two layers."
)


def measure(options: Options) -> Measured:
    """Start a service with two tenants, and ask in quiet and beside a flood, in turn."""
    generator = np.random.default_rng(options.seed)
    tenants = [acting_tenant(name, cameras=("base", "wrist"), image_size=FRAME) for name in ("robot", "flood")]
    with local_ray(SPEC, num_cpus=2) as spec, ThreadPoolExecutor(2) as pool:
        cast("Any", serve).start(proxy_location="Disabled")
        deploying = pool.submit(deploy_replicas, spec, "shared", MeasuredReplica, application="measured")
        service = joynexus.start(spec, root=spec.storage.root)
        list(pool.map(service.open, tenants))
        replica = deploying.result()
        asked = [[one_row(tenant, generator) for _ in range(16)] for tenant in tenants]
        rounds, calls = (1, 20) if options.quick else (6, 40)
        rows = [row for index in range(rounds) for row in _round(replica, asked, index, calls)]
    p95 = {side: [_number(row, "p95_ms") for row in rows if row["side"] == side] for side in SIDES}
    rates = {side: median(_number(row, "flood_rows_s") for row in rows if row["side"] == side) for side in SIDES[1:]}
    ratios = {side: median(a / b for a, b in zip(p95[side], p95["quiet"], strict=True)) for side in SIDES[1:]}
    return Measured(
        headline={
            "flood_p95_ratio": ratios[SIDES[1]],
            "flood_p95_ratio_without_giving_way": ratios[SIDES[2]],
            "flood_rate_kept_by_giving_way": rates[SIDES[1]] / rates[SIDES[2]],
        },
        tables={"One tenant's requests": rows},
        notes=(
            f"Requests of one row, two frames of {FRAME} x {FRAME}; wall time at the caller. Ratios are of one round.",
            "*flood rows/s*: what the flood was answered meanwhile.",
            "Serve's Python for the flood's requests shares the replica's interpreter with the engine, in both ways.",
        ),
    )


def _number(row: Row, name: str) -> float:
    return float(row[name] or 0)


def _round(replica: Any, asked: Sequence[Sequence[PredictRequest]], index: int, calls: int) -> list[Row]:  # noqa: ANN401
    """Measure the sides once, the floods in turn first."""
    robot, flood = asked
    rows: list[Row] = []
    for side in (SIDES[0], *(SIDES[1:] if index % 2 else SIDES[:0:-1])):
        replica.switch.remote(works=True, gives_way=side != SIDES[2]).result()
        seconds, rate = asyncio.run(_ask(replica, robot, flood if side != "quiet" else (), calls, seed=index))
        rows.append(
            {
                "round": index,
                "side": side,
                "p50_ms": float(np.percentile(seconds, 50)) * 1000,
                "p95_ms": float(np.percentile(seconds, 95)) * 1000,
                "flood_rows_s": rate if side != "quiet" else None,
            }
        )
    return rows


async def _ask(
    handle: Any,  # noqa: ANN401  # a Serve handle
    robot: Sequence[PredictRequest],
    flood: Sequence[PredictRequest],
    calls: int,
    *,
    seed: int,
) -> tuple[list[float], float]:
    """Return one tenant's latencies, and how many requests a second the flood was answered."""
    answered = 0

    async def keep_waiting(request: PredictRequest) -> None:
        nonlocal answered
        while True:
            response = handle.predict.remote(request)
            try:
                await response
            except asyncio.CancelledError:
                response.cancel()
                raise
            answered += 1

    callers = [asyncio.create_task(keep_waiting(flood[i % len(flood)])) for i in range(FLOOD if flood else 0)]
    draw = random.Random(seed)
    seconds: list[float] = []
    warmups = 8 if flood else 3  # the flood has to be there, and what its forwards cost has to be learnt
    began, before = time.perf_counter(), 0
    for call in range(-warmups, calls):
        if call == 0:
            began, before = time.perf_counter(), answered
        asked_at = time.perf_counter()
        await handle.predict.remote(robot[call % len(robot)])
        took = time.perf_counter() - asked_at
        seconds += [took] * (call >= 0)
        await asyncio.sleep(max(0.0, PERIOD_S * draw.uniform(0.9, 1.1) - took))
    rate = (answered - before) / (time.perf_counter() - began)
    for each in callers:
        assert not each.done() or each.exception() is None, each.exception()
        each.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    while await handle.num_waiting.remote():
        await asyncio.sleep(0.1)
    return seconds, rate


def draw(result: Any, figure: Any) -> None:  # noqa: ANN401  # matplotlib's
    """Draw the latencies of the three sides."""
    rows = result.tables["One tenant's requests"]
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("p50_ms", "p95_ms"), strict=True):
        axes.boxplot([[row[name] for row in rows if row["side"] == side] for side in SIDES])
        axes.set_xticks(range(1, 4), ["quiet", "flood", "flood,\nnot giving way"])
        axes.set(title=name.removesuffix("_ms"), ylim=(0, None))
    figure.axes[0].set_ylabel("milliseconds of the other tenant")


STUDY = Study(
    name="cluster/flood",
    title="A flood and its neighbour",
    question=QUESTION,
    measure=measure,
    draw=draw,
    devices=("cpu",),
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
