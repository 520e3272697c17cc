"""Proximal policy optimisation over action chunks: collect whole episodes, then a few epochs of minibatches.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347; the loss is :func:`joynexus.training.losses.ppo`.

    collecting: offer -> waiting, until episodes_per_iteration are there
    updating:   num_epochs x minibatches of the decisions, one train_batch each; nothing is asked of the queue
    boundary:   iteration + 1, a new policy version, a checkpoint; then the episodes are settled
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from joynexus.errors import InvalidBatchError, NonFiniteError
from joynexus.specs.algorithm import PpoSpec
from joynexus.specs.tenant import RlSpec, TenantSpec
from joynexus.training.json_values import JsonObject, integer_in, number_in, numbers_in, object_in
from joynexus.training.learners.base import Boundary, Learner, LearnerCall, OfferAnswer, finite
from joynexus.training.learners.experience import check_trajectory, collect_decisions
from joynexus.training.learners.seen import SeenEpisodes
from joynexus.training.learners.update import Update
from joynexus.types import LaneItem, Loss, TrainingResult, Trajectory, WorkloadProgress

log = logging.getLogger(__name__)

MIN_REMEMBERED = 1024
"""Episodes that are remembered as seen, at the least; older ones count as stale."""


class PpoLearner(Learner):
    """Learner of an ``rl`` workload with algorithm ``ppo``."""

    def __init__(self, tenant: TenantSpec, workload_index: int) -> None:
        super().__init__(tenant, workload_index)
        spec = tenant.workloads[workload_index]
        assert isinstance(spec, RlSpec)
        assert isinstance(spec.algorithm, PpoSpec)
        self._spec = spec
        self._ppo = spec.algorithm
        self._wanted = spec.rollout.episodes_per_iteration
        self._waiting: dict[int, LaneItem] = {}
        """By episode."""
        self._episodes: tuple[int, ...] = ()
        self._seen = SeenEpisodes(max(MIN_REMEMBERED, 8 * self._wanted))
        self._update: Update | None = None
        self._schedule_steps = 0
        self._is_under_way = False
        self._steps = 0
        self._iteration = 0
        self._dropped_stale = 0
        self._dropped_invalid = 0
        self._loss_first: float | None = None
        self._loss_last: float | None = None
        self._metrics: dict[str, float] = {}

    def room(self) -> int:
        """How many further episodes the next update needs; none while one runs."""
        if self._update is not None or self._iteration >= self._spec.num_iterations:
            return 0
        return max(self._wanted - len(self._waiting), 0)

    def offer(self, item: LaneItem) -> OfferAnswer:
        """Keep an episode for the next update, unless it is known, too old or not to be learnt from."""
        trajectory = item.payload
        if not isinstance(trajectory, Trajectory):
            raise InvalidBatchError(
                f"tenant {item.tenant!r}: item {item.item_id!r} is a {type(trajectory).__name__}, "
                "algorithm 'ppo' needs a Trajectory. Put episodes into its lane."
            )
        if item.workload != self.workload_index or self._iteration >= self._spec.num_iterations:
            return "stale"
        if item.ordinal in self._seen or item.ordinal in self._waiting:
            return "duplicate"
        if self._is_stale(item):
            self._drop_stale(item)
            return "stale"
        try:
            check_trajectory(trajectory)
        except NonFiniteError as error:  # a simulator's hiccup: it costs an episode, not the run
            self._dropped_invalid += 1
            self._seen.add(item.ordinal)
            log.warning("tenant %s: %s", self.tenant.tenant, error)
            return "stale"
        self._waiting[item.ordinal] = item
        return "ok"

    def oldest_useful(self) -> int:
        """Return the lowest policy version that is not too stale."""
        return max(self.version - self._spec.rollout.max_staleness, 0)

    def next_call(self) -> LearnerCall | None:
        """Return the next minibatch; begins an update once enough episodes wait."""
        if self._is_under_way:
            return None
        if self._update is None and not self._begin():
            return None
        assert self._update is not None
        self._is_under_way = True
        return LearnerCall(
            batch=self._update.decisions.batch.rows(self._update.next_rows()),
            loss=self._loss(),
            optimizer=self._ppo.optimizer,
            schedule_steps=self._schedule_steps,
        )

    def on_result(self, result: TrainingResult) -> Boundary:
        """Count a minibatch; the last one ends the iteration."""
        assert self._update is not None
        self._is_under_way = False
        self._steps += 1
        self._update.note(result)
        if not self._update.is_finished:
            return Boundary()
        self._end(self._update)
        return Boundary(publish=True, checkpoint=True)

    def progress(self) -> WorkloadProgress:
        """Tell how far the workload is."""
        return WorkloadProgress(
            tenant=self.tenant.tenant,
            workload=self.workload_index,
            kind="rl",
            steps=self._steps,
            iterations=self._iteration,
            target=self._spec.num_iterations,
            next_ordinal=max([self._seen.next_unseen, *(episode + 1 for episode in self._waiting)]),
            policy_version=self.version,
            loss_first=self._loss_first,
            loss_last=self._loss_last,
            metrics={**self._metrics, "dropped_invalid": float(self._dropped_invalid)},
            episodes=self._episodes,
            dropped_stale=self._dropped_stale,
            finished=self._iteration >= self._spec.num_iterations,
        )

    def state(self) -> JsonObject:
        """Return counters and the episodes that were seen; those that wait come again."""
        assert self._update is None, "between iterations only"
        return {
            "iteration": self._iteration,
            "steps": self._steps,
            "dropped_stale": self._dropped_stale,
            "dropped_invalid": self._dropped_invalid,
            "seen": self._seen.state(),
            "loss_first": self._loss_first,
            "loss_last": self._loss_last,
            "metrics": dict(self._metrics),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last finished iteration."""
        self._iteration, self._steps = integer_in(state, "iteration"), integer_in(state, "steps")
        self._dropped_stale, self._dropped_invalid = (
            integer_in(state, "dropped_stale"),
            integer_in(state, "dropped_invalid"),
        )
        self._seen.restore(object_in(state, "seen"))
        self._loss_first = number_in(state, "loss_first")
        self._loss_last = number_in(state, "loss_last")
        self._metrics = numbers_in(state, "metrics")

    def _begin(self) -> bool:
        """Begin an update if enough episodes wait: the earliest ones, in an order that arrival can't change."""
        for episode, item in list(self._waiting.items()):
            if self._is_stale(item):  # it came early, and an update went by
                self._drop_stale(item)
                self.settle(item.item_id)
                del self._waiting[episode]
        if self._iteration >= self._spec.num_iterations or len(self._waiting) < self._wanted:
            return False
        items = [self._waiting.pop(episode) for episode in sorted(self._waiting)[: self._wanted]]
        found = [(item, item.payload) for item in items if isinstance(item.payload, Trajectory)]
        for item, _ in found:
            self._seen.add(item.ordinal)
            self.settle(item.item_id)
        trajectories = [trajectory for _, trajectory in found]
        self._episodes = tuple(item.ordinal for item in items)
        self._metrics = self._describe(trajectories)
        decisions = collect_decisions(
            trajectories,
            discount=self._ppo.discount,
            gae_lambda=self._ppo.gae_lambda,
            is_normalized=self._ppo.normalize_advantages,
        )
        self._update = Update(
            decisions,
            self._ppo,
            seed=self.tenant.seed,
            workload=self.workload_index,
            iteration=self._iteration,
        )
        # Episodes differ in length: what is left is taken to be as long as this iteration, so that the schedule ends
        # with the last step.
        self._schedule_steps = self._steps + self._update.num_steps * (self._spec.num_iterations - self._iteration)
        return True

    def _end(self, update: Update) -> None:
        self._metrics = finite({**self._metrics, **update.metrics()})
        self._loss_last = self._metrics.get("loss")
        self._loss_first = self._loss_last if self._loss_first is None else self._loss_first
        self._update = None
        self._iteration += 1

    def _is_stale(self, item: LaneItem) -> bool:
        return item.policy_version < self.oldest_useful()

    def _drop_stale(self, item: LaneItem) -> None:
        self._dropped_stale += 1
        self._seen.add(item.ordinal)

    def _loss(self) -> Loss:
        ppo = self._ppo
        parameters = {
            "clip_low": ppo.clip_low,
            "clip_high": ppo.clip_high,
            "value_coefficient": ppo.value_coefficient,
            "entropy_coefficient": ppo.entropy_coefficient,
        }
        clip = {} if ppo.value_clip is None else {"value_clip": ppo.value_clip}
        return Loss(name="ppo", parameters={**parameters, **clip})

    def _describe(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return what the episodes of an update tell of the policy that acted."""
        count, decisions = len(trajectories), sum(len(each) for each in trajectories)
        return {
            "return_mean": sum(float(each.rewards.sum()) for each in trajectories) / count,
            "success_once": sum(each.success_once for each in trajectories) / count,
            "success_at_end": sum(each.success_at_end for each in trajectories) / count,
            "episode_steps": sum(int(each.num_steps.sum()) for each in trajectories) / count,
            "staleness": sum(self.version - each.policy_version for each in trajectories) / count,
            "features_shipped": sum(len(each) for each in trajectories if each.features is not None) / decisions,
            "decision_bytes": sum(each.nbytes for each in trajectories) / decisions,
            "iteration": float(self._iteration),
        }
