"""Which policy versions act together as one stack, and which each by itself.

One stack per spec, size and schema signature: its slots hold copies of the parameters of the versions that acted
last. A version that is published takes over its predecessor's slot, which costs one copy; a change in the number of
slots builds the stack anew. A stack runs only when nearly all its slots are asked for, because the idle ones cost as
much as the others; so it pays where many tenants ask at the same time, and is left alone where they do not.

Whether a stack gives the very numbers of its modules is tried once for each size; where it does not, ``auto`` lets
each module act by itself. Neighbours can therefore change a tenant's numbers only where the operator said ``always``.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from joynexus.inference.heads import HeadJob, HeadRows, act, act_rows, finish, forwards, rows_per_forward
from joynexus.inference.policies import ServedPolicy
from joynexus.models.action_module import Decision
from joynexus.models.prefix import PrefixFeatures
from joynexus.models.stacked import StackedModule, can_stack

MIN_PRESENT = 3
"""Versions from which a stack pays: with two MLPs it was measured at 0.92 to 1.1 times the speed of a loop."""
MAX_SLOTS = 16
"""Of one stack: what it saves grows little beyond."""
IDLE_SHARE = 8
"""A stack runs when at most one in so many of its slots is idle."""
IDLE_GROUPS = 16
"""Groups after which a slot that nobody asked for is given up."""

StackMode = Literal["never", "auto", "always"]


class HeadStacks:
    """The stacks of one engine. For one thread at a time."""

    def __init__(self, mode: StackMode) -> None:
        """Start without stacks.

        Args:
            mode: As ``InferenceSpec.stack_heads``.
        """
        self._mode: StackMode = mode
        self._stacks: dict[Hashable, _Stack] = {}
        self._verdicts: dict[tuple[Hashable, int, int], bool] = {}
        """By key, slots and threads: whether a stack gives the numbers of each module by itself."""
        self.num_stacked = 0
        """Forwards that took several tenants' modules since the start."""

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks."""
        return sum(each.nbytes for each in self._stacks.values())

    def key(self, served: ServedPolicy) -> Hashable | None:
        """Name the stack that a version could be part of; None where its module acts by itself."""
        module = served.parts.module
        if self._mode == "never" or not can_stack(module):
            return None
        key = (type(module), module.spec, module.dims, served.parts.signature)
        try:
            hash(key)
        except TypeError:  # a third party's spec that holds a list or a dict
            return None
        return key

    def act(self, jobs: Sequence[HeadJob]) -> list[Decision]:
        """Act for jobs of different versions under one key, all with or all without exploration.

        Returns:
            One decision per job, in order; as :func:`joynexus.inference.heads.act` gives it.
        """
        stack = self._seat(jobs) if len(jobs) > 1 else None
        if stack is None:
            return [act(job) for job in jobs]
        cut = [forwards(job) for job in jobs]
        decisions: list[list[Decision]] = [[] for _ in jobs]
        for wave in range(max(len(each) for each in cut)):
            rows = {index: each[wave] for index, each in enumerate(cut) if wave < len(each)}
            if stack.is_dense(len(rows)):
                by_version = {jobs[index].served: each for index, each in rows.items()}
                answers = stack.run(by_version, deterministic=jobs[0].deterministic)
                self.num_stacked += 1
            else:
                answers = [act_rows(jobs[index], each) for index, each in rows.items()]
            for index, answer in zip(rows, answers, strict=True):
                decisions[index].append(answer)
        return [finish(job, each) for job, each in zip(jobs, decisions, strict=True)]

    def forget(self, tenant: str) -> None:
        """Leave nothing of a tenant's parameters."""
        for key, stack in list(self._stacks.items()):
            stack.forget(tenant)
            if stack.is_empty:
                del self._stacks[key]

    def _seat(self, jobs: Sequence[HeadJob]) -> "_Stack | None":
        """Return the stack of some jobs, with all of them seated; None where each had better act by itself."""
        like, present = jobs[0].served.parts.module, [job.served for job in jobs]
        key, rows = self.key(jobs[0].served), rows_per_forward(jobs[0].state.device)
        if key is None:
            return None
        stack = self._stacks.get(key) or _Stack(rows)
        wanted = stack.plan(present)
        if not _is_dense(len(present), len(wanted)) or len(wanted) > MAX_SLOTS:
            return None
        verdict = (key, len(wanted), torch.get_num_threads())
        if self._mode == "auto" and verdict not in self._verdicts:
            trial = StackedModule(like, slots=len(wanted), rows=rows)
            self._verdicts[verdict] = trial.is_exact(like, jobs[0].prefix)
        if not self._verdicts.get(verdict, True):
            return None
        stack.sit(wanted)
        self._stacks[key] = stack
        return stack


class _Stack:
    """The slots of one stack, and who sits where."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._module: StackedModule | None = None
        self._seated: list[ServedPolicy | None] = []
        self._idle: dict[ServedPolicy, int] = {}
        """Groups since each seated version was asked for."""

    @property
    def is_empty(self) -> bool:
        return not any(self._seated)

    @property
    def nbytes(self) -> int:
        return 0 if self._module is None else self._module.nbytes

    def is_dense(self, present: int) -> bool:
        """Whether so many versions fill the stack enough to be worth its run."""
        return _is_dense(present, len(self._seated))

    def plan(self, present: Sequence[ServedPolicy]) -> list[ServedPolicy]:
        """Say who would sit where with all of ``present``: on their own slots, else their predecessors', else new ones.

        It changes nothing but the idle times: versions that have not been asked for lately lose their slots.
        """
        self._idle = {served: 0 if served in present else idle + 1 for served, idle in self._idle.items()}
        seated = [each for each in self._seated if each is not None]
        wanted = [each for each in seated if each in present or self._idle[each] < IDLE_GROUPS]
        for served in present:
            if served in wanted:
                continue
            older = (i for i, each in enumerate(wanted) if each.tenant == served.tenant and each not in present)
            slot = next(older, None)
            if slot is None:
                wanted.append(served)
            else:
                wanted[slot] = served
        return wanted

    def sit(self, wanted: Sequence[ServedPolicy]) -> None:
        """Bring the slots to what is wanted, copying only what is not there yet."""
        if self._module is None or self._module.slots != len(wanted):
            self._module = StackedModule(wanted[0].parts.module, slots=len(wanted), rows=self._rows)
            self._seated = [None] * len(wanted)
        for slot, (had, served) in enumerate(zip(self._seated, wanted, strict=True)):
            if served is not had:
                self._module.load(slot, served.parts.module)
        self._seated = list(wanted)
        self._idle = {served: self._idle.get(served, 0) for served in wanted}

    def run(self, rows: Mapping[ServedPolicy, HeadRows], *, deterministic: bool) -> list[Decision]:
        """Act for the rows of seated versions; idle slots are given copies of some rows, and nobody their answers."""
        assert self._module is not None
        filler = next(iter(rows.values()))
        filler = replace(filler, generators=[torch.Generator().manual_seed(0) for _ in filler.generators])
        ordered = [filler if served is None else rows.get(served, filler) for served in self._seated]
        decisions = self._module.act(
            PrefixFeatures.concatenate([each.prefix for each in ordered]),
            torch.cat([each.state for each in ordered]),
            [generator for each in ordered for generator in each.generators],
            deterministic=deterministic,
        )
        return [decisions[self._seated.index(served)] for served in rows]

    def forget(self, tenant: str) -> None:
        """Empty a tenant's slots."""
        for slot, served in enumerate(self._seated):
            if served is not None and served.tenant == tenant:
                assert self._module is not None
                self._module.clear(slot)
                self._seated[slot] = None
                del self._idle[served]


def _is_dense(present: int, slots: int) -> bool:
    return present >= max(MIN_PRESENT, slots - slots // IDLE_SHARE)
