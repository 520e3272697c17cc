"""The book of a service: over restarts of its engines and of the Master."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from joynexus.actors.usage import UsageBook
from joynexus.observability.engine_usage import EngineLedger, EngineUsage, RowCount
from joynexus.specs.service import ServiceSpec, default_service


class Trainer:
    """An engine that was built at some time, as its pings tell of it."""

    def __init__(self) -> None:
        self.ledger = EngineLedger()

    def work(self, tenant: str, seconds: float) -> None:
        self.ledger.charge(tenant, "prefix", seconds)
        self.ledger.record_group({tenant: RowCount(samples=2, encoded=2)})

    def ping(self) -> dict[str, Any]:
        return {"usage": self.ledger.usage(), "groups": self.ledger.groups.since()}


@pytest.fixture
def spec() -> ServiceSpec:
    return default_service()


@pytest.fixture
def book(spec: ServiceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UsageBook:
    return open_book(spec, tmp_path, monkeypatch)


def open_book(spec: ServiceSpec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> UsageBook:
    """A book of a service without replicas."""
    opened = UsageBook(spec, "nowhere", folder / "usage.json")
    monkeypatch.setattr(opened, "_ask_store", lambda method, *arguments: {} if method == "inference_usage" else [])
    return opened


def training(book: UsageBook) -> dict[str, Any]:
    (engines,) = book.report().values()
    return engines["training"]


def backbone_of(spec: ServiceSpec) -> str:
    return next(iter(spec.backbones))


def test_a_trainer_that_is_replaced_loses_and_repeats_nothing(book, spec):
    name, first, second = backbone_of(spec), Trainer(), Trainer()
    first.work("a", 1.0)
    book.observe(name, first.ping())
    first.work("b", 2.0)
    book.observe(name, first.ping())
    book.retire(name)
    assert training(book)["device_seconds"] == {"a": 1.0, "b": 2.0}
    second.work("a", 0.5)
    book.observe(name, second.ping())
    book.observe(name, second.ping())
    found = training(book)
    assert found["device_seconds"] == {"a": 1.5, "b": 2.0}
    assert found["by_kind"] == {"a": {"prefix": 1.5}, "b": {"prefix": 2.0}}
    assert (found["num_groups"], found["samples"]) == (3, {"a": 4, "b": 2})
    assert [each["busy_seconds"] for each in found["engines"]] == [0.5]
    assert book.by_tenant() == {"a": 1.5, "b": 2.0}
    assert book.groups()[name]["training"].samples.tolist() == [2, 2, 2]


def test_a_master_that_comes_back_knows_the_trainers_that_are_gone(book, spec, tmp_path, monkeypatch):
    name, trainer = backbone_of(spec), Trainer()
    trainer.work("a", 1.0)
    book.observe(name, trainer.ping())
    book.retire(name)
    again = open_book(spec, tmp_path, monkeypatch)
    assert training(again) == training(book)
    again.retire(name)  # it has seen nothing of the one that is dead now
    assert training(again) == training(book)


def test_replicas_are_told_apart_by_backbone(book, spec, monkeypatch):
    name, usage = backbone_of(spec), of_a_replica()
    answers: dict[str, Any] = {"0123456789": {"backbone": name, "engine": usage}, "new": {}}
    answers["elsewhere"] = {"backbone": "other", "engine": usage}
    monkeypatch.setattr(book, "_ask_store", lambda method, *arguments: answers)
    found = book.report()[name]["inference"]
    assert found["device_seconds"] == {"a": 3.0}
    assert [each["name"] for each in found["engines"]] == ["replica 012345"]


def of_a_replica() -> EngineUsage:
    ledger = EngineLedger()
    ledger.charge("a", "head_forward", 3.0)
    return dataclasses.replace(ledger.usage(), wall_seconds=4.0, capacity_seconds=4.0)
