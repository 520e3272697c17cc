import pytest

from joynexus.scheduling.cost import PRIOR_HEAD_S, PRIOR_TOKEN_S, CostModel, Measured, Settlement
from joynexus.scheduling.fairness import FairShare


def call(rows: int, encoded: int, *, token_s: float = 1e-4, head_s: float = 1e-3, tokens: int = 10) -> Measured:
    return Measured(rows=rows, encoded=encoded, prefix_s=encoded * tokens * token_s, head_s=rows * head_s)


def model(*tenants: str, tokens: int = 10) -> CostModel:
    costs = CostModel()
    for tenant in tenants:
        costs.add(tenant, tokens=tokens)
    return costs


def test_before_anything_is_measured_the_priors_count():
    costs = model("a")
    assert costs.estimate("a", 4) == pytest.approx(4 * (10 * PRIOR_TOKEN_S + PRIOR_HEAD_S))
    costs.add("b", tokens=10, head_s=0.5)
    assert costs.estimate("b", 1) == pytest.approx(10 * PRIOR_TOKEN_S + 0.5)
    assert costs.estimate("never added", 1) > 0


def test_estimate_is_what_was_measured():
    costs = model("a")
    for _ in range(20):
        costs.measured("a", call(8, 8))
    assert costs.estimate("a", 8) == pytest.approx(8 * (10 * 1e-4 + 1e-3))
    assert costs.estimate("a", 8, encoded=0) == pytest.approx(8 * 1e-3)


def test_the_first_measurement_does_not_linger():
    costs = model("a")
    costs.measured("a", call(8, 8, token_s=1.0, head_s=1.0))
    costs.measured("a", call(8, 8))
    assert costs.estimate("a", 8) == pytest.approx(8 * (10 * 1e-4 + 1e-3))


def test_a_tenant_that_finds_its_prefixes_is_soon_expected_to():
    costs = model("a")
    costs.measured("a", call(8, 8))
    for _ in range(12):
        costs.measured("a", call(8, 0))
    assert costs.encoded_part("a") < 0.02
    assert costs.estimate("a", 8) == pytest.approx(8 * 1e-3, rel=0.05)


def test_a_new_tenant_is_taken_for_an_average_one():
    costs = model("a")
    for _ in range(3):
        costs.measured("a", call(8, 8))
    costs.add("b", tokens=20)
    assert costs.estimate("b", 1) == pytest.approx(20 * 1e-4 + 1e-3)
    costs.remove("a")
    costs.remove("a")
    assert costs.estimate("b", 1) == pytest.approx(20 * 1e-4 + 1e-3)


def test_a_call_without_rows_teaches_nothing():
    costs = model("a")
    before = costs.estimate("a", 1)
    costs.measured("a", Measured(head_s=5.0))
    assert costs.estimate("a", 1) == before


class Engine:
    """A ledger of sums, as engines keep it."""

    def __init__(self) -> None:
        self.sums: dict[str, Measured] = {}

    def spent(self, tenant: str) -> Measured:
        return self.sums.get(tenant, Measured())

    def run(self, tenant: str, cost: Measured) -> None:
        known = self.spent(tenant)
        self.sums[tenant] = Measured(
            rows=known.rows + cost.rows,
            encoded=known.encoded + cost.encoded,
            prefix_s=known.prefix_s + cost.prefix_s,
            head_s=known.head_s + cost.head_s,
        )


@pytest.fixture
def engine():
    return Engine()


def charge(fair: FairShare, settlement: Settlement, tenant: str, cost: float) -> None:
    fair.charge(tenant, cost)
    settlement.charged(tenant, cost)


def settled(engine: Engine) -> tuple[FairShare, CostModel, Settlement]:
    fair, costs = FairShare(), model("a", "b")
    for tenant in "ab":
        fair.add(tenant)
    return fair, costs, Settlement(fair, costs, engine.spent)


def test_what_was_charged_too_much_is_given_back(engine: Engine):
    fair, _, settlement = settled(engine)
    ready = {"a": 0.0, "b": 0.0}
    fair.choose(ready)
    charge(fair, settlement, "a", 100.0)
    engine.run("a", call(1, 0, head_s=0.5))
    charge(fair, settlement, "b", 1.0)
    engine.run("b", call(1, 0, head_s=1.0))
    assert settlement.settle().seconds == pytest.approx(1.5)
    assert fair.choose(ready) == "a"
    assert settlement.settle() == Measured()


def test_what_is_measured_late_is_settled_late(engine: Engine):
    """On a GPU the sums lag behind the calls."""
    fair, _, settlement = settled(engine)
    charge(fair, settlement, "a", 100.0)
    charge(fair, settlement, "b", 1.0)
    assert settlement.settle() == Measured()
    assert fair.choose({"a": 0.0, "b": 0.0}) == "b"
    engine.run("a", call(1, 0, head_s=0.5))
    settlement.settle()
    assert fair.choose({"a": 0.0, "b": 0.0}) == "a"


def test_a_hiccup_and_the_first_call_are_nobodys_debt(engine: Engine):
    fair, costs, settlement = settled(engine)
    for seconds in (60.0, 1.0, 1.0, 60.0):
        charge(fair, settlement, "a", costs.estimate("a", 1))
        engine.run("a", call(1, 0, head_s=seconds))
        settlement.settle()
    served = 0
    while fair.choose({"a": 0.0, "b": 0.0}) == "b":
        fair.charge("b", 1.0)
        served += 1
    assert served <= 8


def test_forgotten_tenant_is_not_settled(engine: Engine):
    fair, _, settlement = settled(engine)
    charge(fair, settlement, "a", 1.0)
    engine.run("a", call(1, 0))
    settlement.forget("a")
    settlement.forget("a")
    fair.remove("a")
    assert settlement.settle() == Measured()
