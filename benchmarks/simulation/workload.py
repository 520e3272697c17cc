"""Who comes, when, and what each wants: a seeded mixture of SFT, RL and evaluation."""

import random
from dataclasses import dataclass
from typing import Literal

BLOCK_ROWS = 16
"""Rows that are looked up and stored together; batch sizes and datasets are multiples of it."""

HALF = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class SftWork:
    """Supervised fine-tuning: ``num_steps`` micro-batches of a dataset, epoch after epoch, blocks in a new order."""

    dataset: str
    """Tenants that name one dataset see the same frames, so they may find each other's features."""
    dataset_rows: int
    batch_rows: int
    num_steps: int

    @property
    def blocks_per_batch(self) -> int:
        """Blocks of one micro-batch."""
        return self.batch_rows // BLOCK_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class RlWork:
    """PPO: collect episodes, then ``num_epochs`` passes over their decisions, while the next ones are collected."""

    num_iterations: int
    episodes: int
    """Per iteration; a multiple of ``num_envs``."""
    decisions: int
    """Of one episode: action chunks."""
    num_envs: int
    """Simulators of the one worker; they step together, and their rows are one request."""
    step_s: float
    """Wall time of the simulators for one chunk, mean."""
    num_epochs: int
    minibatch_rows: int

    @property
    def rows(self) -> int:
        """Decisions of one iteration."""
        return self.episodes * self.decisions


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationWork:
    """Episodes with a policy as it is."""

    episodes: int
    """A multiple of ``num_envs``."""
    decisions: int
    num_envs: int
    step_s: float


Work = SftWork | RlWork | EvaluationWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """One tenant of the simulation."""

    name: str
    arrival_s: float
    signature: str
    """Tenants of one signature may share a forward."""
    work: Work
    weight: float = 1.0
    seed: int = 0

    @property
    def kind(self) -> Literal["sft", "rl", "evaluation"]:
        """What it does."""
        if isinstance(self.work, SftWork):
            return "sft"
        return "rl" if isinstance(self.work, RlWork) else "evaluation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """What tenants are drawn from. Runs of minutes stand for runs of hours: ratios do not depend on the length."""

    sft: float = 0.5
    """Fraction of tenants; what is left of 1 after ``rl`` too evaluates."""
    rl: float = 0.35
    signatures: int = 2
    """Layouts of the prefix; half of all tenants have the first, a quarter the second, and so on."""
    tenants_per_dataset: int = 4
    """Mean number of SFT tenants on one dataset."""
    mean_gap_s: float = 0.5
    """Between two arrivals, exponentially distributed (a Poisson process)."""


def block_order(work: SftWork, seed: int, epoch: int) -> list[int]:
    """Return the order in which an epoch visits the dataset's blocks."""
    order = list(range(work.dataset_rows // BLOCK_ROWS))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def jitter(rng: random.Random) -> float:
    """Return a factor for a step of a simulator: uniform within a quarter, mean 1."""
    return 0.75 + 0.5 * rng.random()


def draw_tenants(count: int, seed: int, mixture: Mixture | None = None) -> list[Tenant]:
    """Draw tenants, in order of arrival.

    Args:
        count: How many.
        seed: Equal seeds give equal tenants; more tenants do not change the first ones.
        mixture: What to draw from; None takes the defaults.
    """
    mixture = mixture or Mixture()
    rng = random.Random(f"tenants/{seed}")
    now = 0.0
    tenants: list[Tenant] = []
    for index in range(count):
        work = _draw_work(rng, mixture, index)
        last = mixture.signatures - 1
        signature = next((each for each in range(last) if rng.random() < HALF), last)
        if isinstance(work, SftWork):  # a dataset has one layout of its frames
            signature = int(work.dataset.rpartition("-")[2]) % mixture.signatures
        tenants.append(
            Tenant(
                name=f"t{index:04d}-{type(work).__name__.removesuffix('Work').lower()}",
                arrival_s=now,
                signature=f"layout-{signature}",
                work=work,
                seed=rng.randrange(1 << 30),
            )
        )
        now += rng.expovariate(1.0 / mixture.mean_gap_s)
    return tenants


def _draw_work(rng: random.Random, mixture: Mixture, index: int) -> Work:
    kind = rng.random()
    if kind < mixture.sft:
        # The pool of datasets grows with the tenants: a tenant picks one that another one may know.
        number = rng.randrange(1 + int(index * mixture.sft / mixture.tenants_per_dataset))
        return SftWork(
            dataset=f"dataset-{number}",
            dataset_rows=random.Random(f"dataset/{number}").choice((640, 1280, 2560)),
            batch_rows=rng.choice((16, 32, 64)),
            num_steps=rng.choice((100, 200, 300)),
        )
    num_envs = rng.choice((2, 4))
    decisions, step_s = rng.choice((10, 20, 30)), rng.uniform(0.15, 0.6)
    if kind < mixture.sft + mixture.rl:
        return RlWork(
            num_iterations=rng.choice((3, 5)),
            episodes=8,
            decisions=decisions,
            num_envs=num_envs,
            step_s=step_s,
            num_epochs=4,
            minibatch_rows=64,
        )
    return EvaluationWork(episodes=20, decisions=decisions, num_envs=num_envs, step_s=step_s)
