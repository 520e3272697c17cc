"""Simulator processes and sessions, with fake environments in real processes."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from joynexus.envs.base import ChunkOutcome, EpisodeStart
from joynexus.envs.child import child_environment
from joynexus.envs.session import VectorSession
from joynexus.errors import AssetsMissingError, ContractError, InvalidBatchError, SimulatorError, SpecError
from joynexus.specs.environment import GymSpec
from joynexus.testing.fakes import COUNTER
from joynexus.types import Observation, ViewSpec

pytestmark = pytest.mark.timeout(180)  # processes start slowly on a loaded machine

BLIND = ViewSpec(cameras=(), image_size=(16, 16))
SEEING = ViewSpec(cameras=("render",), image_size=(16, 16))


def start(episode=0):
    return EpisodeStart(episode=episode, seed=100 + episode, initial_state=episode)


def chunk(*values):
    return np.asarray(values, dtype=np.float32)[:, None]


@pytest.fixture(scope="module")
def shared():
    """Four counters whose every step takes 0.1 s. Tests leave them usable: any reset brings each of them back."""
    session = VectorSession(GymSpec(id=COUNTER, kwargs={"step_s": 0.1}, num_envs=4, step_timeout_s=60.0), BLIND)
    yield session
    session.close()


@pytest.fixture
def open_session():
    sessions = []

    def open_(num_envs=1, view=BLIND, *, render=False, step_timeout_s=60.0, id_=COUNTER, limits=None, **kwargs):
        spec = GymSpec(
            id=id_, kwargs=kwargs, num_envs=num_envs, render=render, step_timeout_s=step_timeout_s, **(limits or {})
        )
        sessions.append(VectorSession(spec, view))
        return sessions[-1]

    yield open_
    for session in sessions:
        session.close()


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_c35_partial_reset_touches_no_other_environment(shared):
    before = shared.reset({env: start(env) for env in range(4)})
    shared.step({env: chunk(*[0] * 7) for env in range(4)})
    starts = shared.num_starts
    again = shared.reset({2: start(9)})
    assert list(again) == [2]
    assert again[2].state[0].tolist() == [0.0, before[2].state[0, 1] + 1.0, 9.0, 109.0]
    after = shared.step({env: chunk(0) for env in range(4)})
    assert [after[env].observation.state[0, 0] for env in range(4)] == [8.0, 8.0, 1.0, 8.0]
    assert shared.num_starts == starts


def test_simulators_run_side_by_side(shared):
    shared.reset({env: start() for env in range(4)})
    began = time.monotonic()
    shared.step({env: chunk(*[0] * 10) for env in range(4)})
    assert 1.0 < time.monotonic() - began < 3.0


def test_c23_a_killed_simulator_is_reported_at_once_and_the_others_finish(shared):
    shared.reset({env: start(env) for env in range(3)})
    for env in range(3):
        shared.begin_step(env, chunk(*[0] * 30))
    killed = time.monotonic()
    os.kill(shared.pids()[1], signal.SIGKILL)
    first = shared.wait(30.0)
    assert time.monotonic() - killed < 2.5
    assert list(first) == [1]
    assert isinstance(first[1], SimulatorError)
    assert "SIGKILL" in str(first[1])
    others = {}
    while len(others) < 2:
        others |= shared.wait(30.0)
    assert {env: each.observation.state[0, 0] for env, each in others.items()} == {0: 30.0, 2: 30.0}
    assert isinstance(shared.reset({1: start(5)})[1], Observation)


def test_step_reports_a_killed_simulator_for_that_one_only(shared):
    shared.reset({0: start(), 1: start()})
    os.kill(shared.pids()[0], signal.SIGKILL)
    answers = shared.step({0: chunk(0), 1: chunk(0)})
    assert isinstance(answers[0], SimulatorError)
    assert isinstance(answers[1], ChunkOutcome)
    again = shared.step({0: chunk(0)})
    assert isinstance(again[0], SimulatorError)
    assert "Call reset first" in str(again[0])


def test_a_hung_simulator_is_killed_and_replaced(open_session):
    session = open_session(num_envs=2, step_timeout_s=3.0, hang_at=3)
    session.reset({0: start(), 1: start()})
    session.step({0: chunk(0), 1: chunk(0)})
    hung = session.pids()[0]
    answers = session.step({0: chunk(0, 0), 1: chunk(0)})
    assert isinstance(answers[0], SimulatorError)
    assert "did not answer step_chunk in time" in str(answers[0])
    assert answers[1].observation.state[0, 0] == 2.0
    assert not is_alive(hung)
    assert session.reset({0: start(3)})[0].state[0, 2] == 3.0
    assert session.num_starts == 3


def test_a_raising_simulator_tells_where(open_session):
    session = open_session(raise_at=2)
    session.reset({0: start()})
    error = session.step({0: chunk(0, 0)})[0]
    assert isinstance(error, SimulatorError)
    assert "RuntimeError: the fake was told to fail" in str(error)
    assert "in _raise" in str(error)


def test_a_vanished_simulator_tells_its_exit_code(open_session):
    session = open_session(die_at=1)
    session.reset({0: start()})
    assert "exit code 7" in str(session.step({0: chunk(0)})[0])


def test_a_question_on_the_terminal_never_hangs(open_session):
    session = open_session(is_asking=True)
    with pytest.raises(AssetsMissingError, match="Download them beforehand"):
        session.reset({0: start()})


def test_errors_at_the_start_keep_their_type(open_session):
    with pytest.raises(SpecError, match="Did you mean 'Counter-v0'"):
        _ = open_session(num_envs=2, id_="joynexus.testing.fakes:Cuonter-v0").contract
    with pytest.raises(ContractError, match="cameras"):
        _ = open_session(view=SEEING).contract


def test_contract_opens_all_simulators_and_reset_uses_them(open_session):
    session = open_session(num_envs=2)
    assert session.contract.state_dim == 4
    assert session.num_starts == 2
    session.reset({0: start(), 1: start()})
    assert session.num_starts == 2


def test_c88_black_frames_are_refused_naming_the_camera(open_session):
    black = open_session(view=SEEING, render=True, is_black=True).reset({0: start()})[0]
    assert isinstance(black, SimulatorError)
    assert "'render'" in str(black)


def test_c89_a_leaking_simulator_is_recycled_and_no_episode_is_lost(open_session):
    limit = 400 << 20
    session = open_session(leak_bytes=5_000_000, limits={"worker_memory_limit_bytes": limit})
    seen, resident = [], []
    for episode in range(200):
        state = session.reset({0: start(episode)})[0].state[0]
        seen.append(int(state[2]))
        with open(f"/proc/{session.pids()[0]}/statm") as file:
            resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert seen == list(range(200))
    assert max(resident) < limit + 20_000_000
    assert 3 <= session.num_starts <= 6


def test_a_simulator_is_replaced_after_its_number_of_resets(open_session):
    session = open_session(limits={"max_resets_per_process": 2})
    resets = [session.reset({0: start(episode)})[0].state[0, 1] for episode in range(5)]
    assert resets == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert session.num_starts == 3
    assert len(session.pids()) == 1


def test_an_idle_simulator_that_died_is_replaced_without_a_crash(open_session):
    session = open_session()
    session.reset({0: start()})
    pid = session.pids()[0]
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not is_alive(pid))
    assert isinstance(session.reset({0: start(1)})[0], Observation)


def test_what_was_given_up_is_thrown_away(shared):
    resets = shared.reset({3: start()})[3].state[0, 1]
    shared.begin_step(3, chunk(0, 0))
    shared.abandon()
    assert shared.wait(0.0) == {}
    observation = shared.reset({3: start(4)})[3]
    assert observation.state[0].tolist() == [0.0, resets + 1.0, 4.0, 104.0]


def test_bad_actions_are_refused_before_they_are_sent(shared):
    shared.reset({3: start()})
    with pytest.raises(InvalidBatchError, match="NaN"):
        shared.step({3: chunk(np.nan)})
    with pytest.raises(InvalidBatchError, match="no environment 4"):
        shared.step({4: chunk(0)})
    assert shared.step({3: chunk(0)})[3].observation.state[0, 0] == 1.0


def test_close_ends_all_processes(open_session):
    session = open_session()
    session.reset({0: start()})
    pids = session.pids()
    session.close()
    session.close()
    assert session.pids() == []
    assert not any(is_alive(pid) for pid in pids)


def test_simulators_outlive_the_thread_that_started_them(open_session):
    session = open_session()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(session.reset, {0: start()}).result()
    time.sleep(0.2)
    assert session.step({0: chunk(0)})[0].observation.state[0, 0] == 1.0


@pytest.mark.parametrize("is_stuck", [False, True])
def test_simulators_end_with_their_parent_however_it_dies(tmp_path, is_stuck):
    script = textwrap.dedent(f"""
        import sys, time
        import numpy as np
        from joynexus.envs.base import EpisodeStart
        from joynexus.envs.session import VectorSession
        from joynexus.specs.environment import GymSpec
        from joynexus.types import ViewSpec

        # No guard on __name__: a simulator must not import its parent's main module.
        spec = GymSpec(id={COUNTER!r}, kwargs={{"hang_at": 1}})
        session = VectorSession(spec, ViewSpec(cameras=(), image_size=(16, 16)))
        session.reset({{0: EpisodeStart(episode=0, seed=0, initial_state=0)}})
        if {is_stuck}:
            session.begin_step(0, np.zeros((1, 1), np.float32))
        print(session.pids()[0], flush=True)
        time.sleep(60)
    """)
    path = tmp_path / "parent.py"
    path.write_text(script)
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    assert until(lambda: not is_alive(pid))


def test_simulators_get_one_thread_and_a_renderer_that_needs_no_screen():
    environment = child_environment({"OMP_NUM_THREADS": "8", "PATH": "/bin"})
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["LP_NUM_THREADS"] == "1"
    assert environment["MUJOCO_GL"] == "egl"
    assert environment["PATH"] == "/bin"
    assert child_environment({"MUJOCO_GL": "osmesa"})["MUJOCO_GL"] == "osmesa"
