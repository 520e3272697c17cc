"""The collector on real simulator processes that are killed under it."""

import os
import signal

import pytest

from joynexus.envs.base import EpisodeStart
from joynexus.envs.session import VectorSession
from joynexus.rollout.collector import Collector, EpisodeCrash
from joynexus.specs.environment import GymSpec
from joynexus.specs.tenant import ActionSpec
from joynexus.testing.fakes import COUNTER, FakePolicy
from joynexus.types import ViewSpec

pytestmark = pytest.mark.timeout(180)  # processes start slowly on a loaded machine


class KillingPolicy(FakePolicy):
    """Kills a session's first simulator once, when it is asked for the n-th time."""

    def __init__(self, session, *, at):
        super().__init__(horizon=4)
        self._session = session
        self._at = at

    def predict(self, request):
        if len(self.requests) == self._at:
            os.kill(self._session.pids()[0], signal.SIGKILL)
        return super().predict(request)


def starts(count):
    return [EpisodeStart(episode=index, seed=index, initial_state=index) for index in range(count)]


@pytest.fixture
def session():
    spec = GymSpec(id=COUNTER, kwargs={"terminate_at": 12, "step_s": 0.01}, num_envs=2)
    session = VectorSession(spec, ViewSpec(cameras=(), image_size=(16, 16)))
    yield session
    session.close()


def collector_of(session, policy):
    action = ActionSpec(dim=1, horizon=4, num_action_steps=4, normalization="identity")
    return Collector(session, policy, tenant="fake", action=action)


def test_evaluation_loses_no_episode_to_a_killed_simulator(session):
    reports = list(collector_of(session, KillingPolicy(session, at=1)).evaluate(starts(6)))
    assert sorted(report.episode for report in reports) == list(range(6))
    assert {report.status for report in reports} == {"success"}
    assert all(report.num_steps == 12 for report in reports)
    assert session.num_starts == 3


def test_rollout_reports_the_crash_and_goes_on_meanwhile(session):
    remaining = iter(starts(8))
    policy = KillingPolicy(session, at=1)
    outcomes = list(collector_of(session, policy).collect(lambda: next(remaining, None)))
    crashes = [each for each in outcomes if isinstance(each, EpisodeCrash)]
    assert [crash.start.episode for crash in crashes] == [0]
    assert "SIGKILL" in crashes[0].error
    assert len(outcomes) == 8
    lonely = [request for request in policy.requests if len(request.observation) == 1]
    assert lonely, "the other environment went on while the killed one started anew"


def test_a_run_that_is_given_up_leaves_a_usable_session(session):
    collector = collector_of(session, FakePolicy(horizon=4))
    reports = collector.evaluate(starts(100))
    first = next(reports)
    reports.close()
    assert first.status == "success"
    again = list(collector.evaluate(starts(2)))
    assert [report.status for report in again] == ["success", "success"]
