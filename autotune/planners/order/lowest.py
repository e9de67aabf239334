"""The lowest of several orders."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from autotune.ordering import Ordering
from autotune.plan import Plan


def lowest(plan: Plan, problem: Ordering, orders: Callable[[Ordering], Iterable[tuple[int, ...]]]) -> Plan:
    """The plan with the order that peaks lowest; its own, unless another is lower, then the earliest of the lowest."""
    return replace(plan, order=min((plan.order, *orders(problem)), key=problem.peak))
