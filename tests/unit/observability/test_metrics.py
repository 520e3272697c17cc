import re
from pathlib import Path

import pytest

from joynexus.observability.metrics import KNOWN, METRICS, check_name
from joynexus.observability.records import evaluation_metrics, progress_metrics, result_metrics
from joynexus.training.learners.update import AVERAGED
from joynexus.types import TrainingResult, WorkloadProgress

DOCUMENT = Path(__file__).parents[3] / "docs/metrics.md"


def documented() -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| `([a-z_]+/[a-z0-9_/]+)` \| (.+?) \| (.+?) \|$", DOCUMENT.read_text(), flags=re.MULTILINE)
    return [(name, unit, meaning) for name, unit, meaning in rows]


def test_every_metric_is_documented_and_no_other_is():
    assert documented() == [(each.name, each.unit, each.meaning) for each in METRICS]
    assert len(KNOWN) == len(METRICS)


def test_every_name_has_the_form():
    for metric in METRICS:
        check_name(metric.name)


@pytest.mark.parametrize(
    "name", ["loss", "Training/loss", "training/", "/loss", "training/the loss", "a/../b", "a/b\n"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="not of the form area/name"):
        check_name(name)


def test_what_a_training_call_answers_is_documented():
    result = TrainingResult(
        tenant="a",
        sequence=3,
        metrics={"loss": 0.5, "rows": 4.0, "lr": 1e-3, "grad_norm": 1.0, "accumulated_rows": 4.0, "skipped": 0.0},
        optimizer_steps=7,
        group_id=11,
        group_tenants=2,
        group_samples=8,
        encoded=3,
        reused=1,
        device_seconds=0.25,
    )
    named = result_metrics(result)
    assert named["training/loss"] == 0.5
    assert named["training/group_tenants"] == 2.0
    assert set(named) <= set(KNOWN)


def test_what_a_learner_tells_is_placed_by_area_and_documented():
    told = [*AVERAGED, "explained_variance", "decisions", "iteration", "return_mean", "success_once", "success_at_end"]
    told += ["episode_steps", "staleness", "dropped_invalid"]
    progress = WorkloadProgress(
        tenant="a",
        workload=1,
        kind="rl",
        steps=8,
        iterations=2,
        target=5,
        next_ordinal=16,
        policy_version=4,
        metrics=dict.fromkeys(told, 1.0),
        dropped_stale=3,
    )
    named = progress_metrics(progress)
    assert named["rollout/return_mean"] == named["training/kl"] == 1.0
    assert named["training/policy_version"] == 4.0
    assert named["rollout/dropped_stale"] == 3.0
    assert set(named) <= set(KNOWN)
    assert len(named) == len(told) + 2


def test_an_evaluation_is_named_and_what_it_lacks_is_left_out():
    summary = {"episodes": 8, "errors": 2, "success_rate": 0.75, "mean_return": None, "status": "INCOMPLETE"}
    named = evaluation_metrics(summary)
    assert named == {"evaluation/episodes": 8.0, "evaluation/errors": 2.0, "evaluation/success_once": 0.75}
    assert set(named) <= set(KNOWN)
