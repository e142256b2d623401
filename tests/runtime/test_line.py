import random

from pipeline.runtime.line import WaitingLine
from pipeline.runtime.request import Priority, Request
from pipeline.runtime.sequence import Sequence


def sequence(order: int, priority: int, arrival: float) -> Sequence:
    request = Request(input_ids=(1,), max_tokens=1, priority=Priority(priority))
    return Sequence(request, order=order, arrival=arrival)


def test_the_order_is_that_of_the_ranks() -> None:
    rng = random.Random(0)
    line = WaitingLine(ageing=10.0)
    everyone = [sequence(order, rng.randrange(3), arrival=order) for order in range(50)]
    for one in rng.sample(everyone, 50):  # paused ones come back late
        line.add(one)
    for gone in rng.sample(everyone, 10):
        line.remove(gone)
        everyone.remove(gone)
    for now in (50.0, 61.0, 75.0, 1000.0):
        assert list(line.in_order(now)) == sorted(everyone, key=lambda one: one.rank(now, 10.0))
    assert len(line) == 40 and {id(one) for one in line} == {id(one) for one in everyone}


def test_ageing_lifts_one_class_at_a_time_and_none_above_the_first() -> None:
    low = sequence(0, 2, arrival=100.0)
    assert [low.rank(100.0 + age, 10.0)[0] for age in (0, 9.9, 10, 19, 20, 500)] == [2, 2, 1, 1, 0, 0]
    assert low.rank(1e9, None)[0] == 2
