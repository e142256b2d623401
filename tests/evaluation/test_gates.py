import math

import pytest

from pipeline.errors import GateError
from pipeline.evaluation.gates import Gate, enforce, spell_bound, spell_value


def gate(value: float, bound: float | None, relation: str = "<=", blame: str = "") -> Gate:
    return Gate(name="mean_kl", value=value, bound=bound, relation=relation, meaning="nats", blame=blame)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "bound", "relation", "passed"),
    [
        (0.04, 0.05, "<=", True),
        (0.05, 0.05, "<=", True),
        (0.06, 0.05, "<=", False),
        (0.91, 0.9, ">=", True),
        (0.89, 0.9, ">=", False),
        (9.0, None, "<=", None),
        (math.nan, 0.05, "<=", False),
        (math.inf, 0.9, ">=", False),
    ],
)
def test_a_gate_holds_a_value_against_its_bound(
    value: float, bound: float | None, relation: str, passed: bool | None
) -> None:
    assert gate(value, bound, relation).passed is passed


@pytest.mark.parametrize(
    ("value", "bound", "spelled"),
    [
        (1.00213, 1.001, "1.002 1.001"),
        (1.0012, 1.001, "1.0012 1.001"),
        (0.89999999, 0.9, "0.89999999 0.9"),
        (1.001, 1.001, "1.001 1.001"),
        (0.1 + 0.2, 0.3, "0.30000000000000004 0.3"),
        (0.123456, 0.2, "0.1235 0.2"),
        (math.nan, 1e-4, "nan 0.0001"),
    ],
)
def test_a_value_is_told_from_its_bound(value: float, bound: float, spelled: str) -> None:
    assert f"{spell_value(value, bound)} {spell_bound(bound)}" == spelled
    described = gate(value, bound).describe().split()
    assert described[2:5] == [spelled.split()[0], "<=", spelled.split()[1]]
    if gate(value, bound).passed is False:
        with pytest.raises(GateError, match=rf"{spelled.split()[0]}, must be <= {spelled.split()[1]} "):
            enforce([gate(value, bound)], "report.json")


def test_enforce_lets_passed_and_skipped_gates_through() -> None:
    enforce([gate(0.0, 1.0), gate(9.0, None)], "report.json")


def test_enforce_names_every_failed_gate_the_worst_layer_and_the_report() -> None:
    gates = [gate(0.0, 1.0), gate(2.0, 1.0, blame="worst layer: 7"), gate(0.1, 0.9, ">="), gate(9.0, None)]
    with pytest.raises(GateError) as caught:
        enforce(gates, "out/x/verify-failed.json")
    message = str(caught.value)
    assert "2 of 3" in message  # one is off
    assert "worst layer: 7" in message
    assert "out/x/verify-failed.json" in message
    assert caught.value.exit_code == 5
