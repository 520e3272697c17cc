"""The PolicyStore: detached owner of every tenant's published policy versions.

    TrainingActor --publish(snapshot)--> PolicyStore <--follow(known)-- InferenceReplica (one long poll each)

The trainer hands over a snapshot and goes on. Each replica keeps one ``follow`` call open, which answers as soon as
something newer than what the replica knows is here: a broadcast that a replica which has just started, or that missed
one, can't fall out of. A large snapshot is a Ray object owned by this actor, so that its bytes reach a node once.
Nobody waits for anybody: a publication never pauses another tenant.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import ray

from joynexus.observability.group_log import GroupColumns, GroupLog, empty_columns
from joynexus.types import PolicySnapshot

BY_VALUE_BYTES = 1 << 20
"""Up to this size a snapshot goes with the answer: an object to make, borrow and fetch costs more than its bytes."""
REPLICA_SILENCE_S = 15.0
"""A replica that has not polled for this long no longer counts for ``served``."""


Known = Mapping[str, tuple[int, int]]
"""What a replica holds: by tenant, the life of its name and the newest version."""


@dataclass(kw_only=True, slots=True)
class _Entry:
    """The resident versions of one tenant: the base and the newest."""

    life: int
    """Which life of the tenant's name: one that left and came back is another tenant."""
    backbone: str
    base: Any
    newest: Any
    version: int

    @property
    def mark(self) -> tuple[int, int]:
        return self.life, self.version


@dataclass(kw_only=True, slots=True)
class _Replica:
    """What a replica said at its last poll."""

    backbone: str
    known: "Known"
    usage: Mapping[str, Any]
    told_at: float
    """When it told its usage."""
    groups: GroupLog
    seen_at: float


@dataclass(kw_only=True, slots=True)
class Changes:
    """The answer to ``follow``: what the replica has to take over, and what to forget."""

    snapshots: list[Any] = field(default_factory=list[Any])
    """Each a :class:`PolicySnapshot` or, where it is large, the reference of one, to be fetched by the replica."""
    removed: list[str] = field(default_factory=list[str])
    """Tenants to forget, before anything is loaded: one that was made anew is among both."""
    known: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """What the replica holds afterwards; it says so at its next poll."""


class PolicyStore:
    """Keeps version 0 and the newest version of each tenant, and tells the replicas."""

    def __init__(self, keep: Callable[[PolicySnapshot], Any] | None = None) -> None:
        """Start empty.

        Args:
            keep: Turns a large snapshot into what replicas are handed; None makes it a Ray object that this actor
                owns.
        """
        self._keep = keep or cast("Callable[[PolicySnapshot], Any]", cast("Any", ray).put)
        self._entries: dict[str, _Entry] = {}
        self._replicas: dict[str, _Replica] = {}
        self._lives = 0
        self._changed = asyncio.Condition()

    async def ping(self) -> dict[str, int]:
        """Tell that the actor lives, and each tenant's newest version."""
        return {tenant: entry.version for tenant, entry in self._entries.items()}

    async def publish(self, backbone: str, snapshot: PolicySnapshot) -> bool:
        """Take over a version; an older one than is resident is ignored.

        Args:
            backbone: Whose replicas serve it.
            snapshot: The version, by value; a large one becomes an object that this actor owns.

        Returns:
            Whether it was new.
        """
        entry = self._entries.get(snapshot.tenant)
        if entry is not None and snapshot.version <= entry.version:
            return False
        is_large = snapshot.nbytes > BY_VALUE_BYTES
        reference = await asyncio.to_thread(self._keep, snapshot) if is_large else snapshot
        async with self._changed:
            base = reference if entry is None or snapshot.version == 0 else entry.base
            self._lives += entry is None
            self._entries[snapshot.tenant] = _Entry(
                life=self._lives if entry is None else entry.life,
                backbone=backbone,
                base=base,
                newest=reference,
                version=snapshot.version,
            )
            self._changed.notify_all()
        return True

    async def remove(self, tenant: str) -> None:
        """Forget a tenant; its replicas do too, with their next poll."""
        async with self._changed:
            self._entries.pop(tenant, None)
            self._changed.notify_all()

    async def follow(
        self, replica: str, backbone: str, known: Known, usage: Mapping[str, Any] | None, timeout_s: float
    ) -> Changes:
        """Wait until a replica lacks something, or has something too much.

        Args:
            replica: The replica's id.
            backbone: What it serves.
            known: What it holds.
            usage: Its usage so far, for the ledger, with the ``groups`` that are new; None where it was told a moment
                ago.
            timeout_s: Answer empty after this long, so that usage is reported again.

        Returns:
            Versions to load (base first where the tenant is new to the replica) and tenants to drop.
        """
        self._take(replica, backbone, known, usage)
        async with self._changed:
            self._changed.notify_all()  # `served` counts what replicas know
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._lacks(backbone, known)), timeout_s)
            except TimeoutError:
                return Changes()
            return self._changes(backbone, known)

    def _take(self, replica: str, backbone: str, known: Known, usage: Mapping[str, Any] | None) -> None:
        """Note what a replica says at its poll."""
        told, now = self._replicas.get(replica), time.monotonic()
        entry = _Replica(
            backbone=backbone,
            known=known,
            usage={} if told is None else told.usage,
            told_at=0.0 if told is None else told.told_at,
            groups=GroupLog() if told is None else told.groups,
            seen_at=now,
        )
        if usage is not None:
            entry.usage = {name: value for name, value in usage.items() if name != "groups"}
            entry.told_at = now
            entry.groups.extend(usage.get("groups") or empty_columns())
        self._replicas[replica] = entry

    def _marks(self, backbone: str) -> dict[str, tuple[int, int]]:
        return {tenant: entry.mark for tenant, entry in self._entries.items() if entry.backbone == backbone}

    def _lacks(self, backbone: str, known: Known) -> bool:
        return self._marks(backbone) != dict(known)

    def _changes(self, backbone: str, known: Known) -> Changes:
        marks = self._marks(backbone)
        gone = [tenant for tenant, (life, _) in known.items() if tenant not in marks or marks[tenant][0] != life]
        changes = Changes(removed=gone, known=marks)
        for tenant, mark in marks.items():
            if known.get(tenant) == mark:
                continue
            entry = self._entries[tenant]
            is_new = tenant not in known or tenant in gone
            if is_new and entry.base is not entry.newest:
                changes.snapshots.append(entry.base)
            changes.snapshots.append(entry.newest)
        return changes

    async def served(self, tenant: str, version: int, timeout_s: float) -> bool:
        """Wait until every living replica of the tenant's backbone holds a version.

        Returns:
            False after ``timeout_s``.
        """
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._is_served(tenant, version)), timeout_s)
            except TimeoutError:
                return False
            return True

    def _is_served(self, tenant: str, version: int) -> bool:
        entry = self._entries.get(tenant)
        if entry is None:
            return False
        alive = [
            each
            for each in self._replicas.values()
            if each.backbone == entry.backbone and time.monotonic() - each.seen_at < REPLICA_SILENCE_S
        ]
        return bool(alive) and all(each.known.get(tenant, (0, -1)) >= (entry.life, version) for each in alive)

    async def inference_usage(self, fresh_s: float = 0.0) -> dict[str, Mapping[str, Any]]:
        """Return the last usage that each replica told, dead ones included.

        Args:
            fresh_s: Wait for so long until every living replica has told it anew.
        """
        asked = time.monotonic()
        while (now := time.monotonic()) < asked + fresh_s:
            if all(each.told_at > asked for each in self._replicas.values() if now - each.seen_at < REPLICA_SILENCE_S):
                break
            await asyncio.sleep(0.05)
        return {name: replica.usage for name, replica in self._replicas.items()}

    async def inference_groups(self) -> list[tuple[str, GroupColumns]]:
        """Return the backbone and the groups of each replica, dead ones included."""
        return [(replica.backbone, replica.groups.since()) for replica in self._replicas.values()]
