"""Whether a set of bundles can stand on a cluster's nodes: now, later, or never. Pure: the caller looks at Ray.

A placement group that can't be placed hangs in Ray without a word. This decides beforehand, and says what is needed
and what there is. Where the search is too large to decide, Ray may try: a wrong refusal would be worse than a wait.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from joynexus.errors import PlacementError
from joynexus.specs.base import Resources
from joynexus.specs.service import ServiceSpec

UNIT = 10_000
"""Ray counts resources in ten-thousandths; so do we, in whole numbers, so that 10 x 0.1 is 1."""
MAX_SEARCH_STEPS = 20_000
"""Of the exact search, after the greedy one failed."""
MAX_SEARCH_BUNDLES = 64
"""Beyond it the greedy search alone decides."""

Amounts = dict[str, int]
"""Resources by Ray's names, in units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResources:
    """One living node, or one that the autoscaler may add."""

    name: str
    total: Mapping[str, float | int]
    """By Ray's names: ``CPU``, ``GPU``, ``memory`` in bytes, custom ones."""
    available: Mapping[str, float | int] | None = None
    """What nobody has reserved; None where it is not known, and then all counts as available."""


def service_bundles(service: ServiceSpec) -> list[Resources]:
    """Return what the service's own roles reserve, tenants aside."""
    training, queue, inference = service.training.resources, service.queue.resources, service.inference
    per_backbone = [training, queue, *([inference.resources] * inference.num_replicas)]
    return per_backbone * len(service.backbones)


def check_bundles(
    bundles: Sequence[Resources],
    nodes: Sequence[NodeResources],
    *,
    owner: str,
    held: Sequence[Resources] = (),
    may_add: Sequence[NodeResources] = (),
    together: bool = False,
) -> Literal["now", "later"]:
    """Decide whether bundles can be placed.

    Args:
        bundles: What is to be reserved, all at once.
        nodes: The living nodes.
        owner: Who asks, for the message.
        held: Reservations that never go away (the service's own roles), where ``available`` is not known.
        may_add: Nodes that the autoscaler may still add, one entry each.
        together: Whether all bundles have to stand on one node.

    Returns:
        ``now`` if they fit into what is available; ``later`` if somebody has to leave, or a node to come, first.

    Raises:
        PlacementError: If they can never be placed, naming what is needed and what there is.
    """
    wanted = [_amounts(each) for each in bundles]
    wanted = [_sum(wanted)] if together and wanted else wanted
    totals = [_units(node.total) for node in (*nodes, *may_add)]
    fixed = [_amounts(each) for each in held]
    if _packs([*fixed, *wanted], totals) is False:
        raise PlacementError(f"{owner}: {_explain(wanted, fixed, nodes, may_add)}")
    free = [_units(node.total if node.available is None else node.available) for node in nodes]
    unknown = any(node.available is None for node in nodes)
    return "now" if _packs([*fixed, *wanted] if unknown else wanted, free) else "later"


def _amounts(resources: Resources) -> Amounts:
    named = {"CPU": resources.num_cpus, "GPU": resources.num_gpus, "memory": float(resources.memory_bytes)}
    return {name: amount for name, amount in _units({**named, **resources.custom}).items() if amount > 0}


def _units(amounts: Mapping[str, float | int]) -> Amounts:
    return {name: round(amount * UNIT) for name, amount in amounts.items()}


def _sum(parts: Sequence[Amounts]) -> Amounts:
    total: Counter[str] = Counter()
    for each in parts:
        total.update(each)
    return dict(total)


def _fits(need: Amounts, room: Amounts) -> bool:
    return all(room.get(name, 0) >= amount for name, amount in need.items())


def _packs(needs: Sequence[Amounts], rooms: Sequence[Amounts]) -> bool | None:
    """Whether all needs fit into the rooms; None if that could not be decided."""
    if not all(any(_fits(need, room) for room in rooms) for need in needs) or not _fits(_sum(needs), _sum(rooms)):
        return False
    whole = _sum(rooms)
    largest_first = sorted(needs, key=lambda each: -max((each[name] / whole[name] for name in each), default=0.0))
    if _first_fit(largest_first, [dict(room) for room in rooms]):
        return True
    if len(needs) > MAX_SEARCH_BUNDLES:
        return None
    search = _Search(largest_first, [dict(room) for room in rooms])
    found = search.place(0)
    return found if found or search.steps <= MAX_SEARCH_STEPS else None


def _first_fit(needs: Sequence[Amounts], rooms: list[Amounts]) -> bool:
    for need in needs:
        room = next((each for each in rooms if _fits(need, each)), None)
        if room is None:
            return False
        _take(need, room)
    return True


def _take(need: Amounts, room: Amounts, times: int = 1) -> None:
    for name, amount in need.items():
        room[name] -= times * amount


class _Search:
    """Depth-first search over which need goes into which room, giving up after a number of steps."""

    def __init__(self, needs: Sequence[Amounts], rooms: list[Amounts]) -> None:
        self._needs = needs
        self._rooms = rooms
        self.steps = 0

    def place(self, index: int) -> bool:
        if index == len(self._needs):
            return True
        need = self._needs[index]
        tried: list[Amounts] = []
        for room in self._rooms:
            self.steps += 1
            if self.steps > MAX_SEARCH_STEPS:
                return False
            if room in tried or not _fits(need, room):  # equal rooms are one choice
                continue
            tried.append(dict(room))
            _take(need, room)
            if self.place(index + 1):
                return True
            _take(need, room, times=-1)
        return False


def _explain(
    wanted: Sequence[Amounts],
    fixed: Sequence[Amounts],
    nodes: Sequence[NodeResources],
    may_add: Sequence[NodeResources],
) -> str:
    names = sorted({name for each in wanted for name in each})
    totals = [_units(node.total) for node in (*nodes, *may_add)]
    free = _sum([_units(node.total if node.available is None else node.available) for node in nodes])
    whole = f"{_show(_sum(totals), names)} on {len(totals)} nodes, {_show(free, names)} free"
    too_big = [each for each in wanted if not any(_fits(each, room) for room in totals)]
    if too_big:
        most = {name: max((room.get(name, 0) for room in totals), default=0) for name in names}
        what = f"a bundle needs {_show(too_big[0], names)}, and no node has more than {_show(most, names)}"
    else:
        what = f"needed are {_show(_sum(wanted), names)} in {len(wanted)} bundles"
        what += f" beside {_show(_sum(fixed), names)} of the service's own roles" if fixed else ""
    return f"cannot be placed: {what}; the cluster has {whole}. Lower the resources or the workers, or add nodes."


def _show(amounts: Amounts, names: Sequence[str]) -> str:
    shown = {name: f"{amounts.get(name, 0) / UNIT:.4f}".rstrip("0").rstrip(".") for name in names}
    return ", ".join(f"{amount} {name}" for name, amount in shown.items()) or "nothing"
