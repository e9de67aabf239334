"""Run one case in both ways, and judge: equal, refused, different, or a crash."""

import traceback
import warnings
from dataclasses import dataclass
from enum import StrEnum

import torch

from autotune.capture.python.side_effects import SideEffectWarning
from autotune.errors import AutotuneError
from experiments.benchmarks.loops.ways import Case, Plain, Planned, Way


class Verdict(StrEnum):
    """Result of a case."""

    EQUAL = "equal"
    WARNED = "warned"
    REFUSED = "refused"
    DIFFERENT = "different"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Trial:
    """One case in both ways."""

    name: str
    verdict: Verdict
    detail: str
    """The refusal, the first difference, or the foreign exception."""
    plain_error: str
    """Exception of the loop in plain PyTorch; empty if it ran."""


def try_case(case: Case) -> Trial:
    """Run a case in plain PyTorch and under a plan, from one seed, and compare every bit that it yields.

    A loop that is refused must have been equal until then. An exception in plain PyTorch may be the same exception
    under a plan.
    """
    plain, plain_error, _ = _run(case, Plain())
    planned, error, warned = _run(case, Planned())
    name = case.__name__
    wanted = f"{type(plain_error).__name__}: {plain_error}".splitlines()[0] if plain_error is not None else ""
    count = len(planned) if error is not None else max(len(plain), len(planned))
    difference = _first_difference(plain[:count], planned[:count])
    if difference and warned and plain_error is None and error is None:
        difference = _first_difference(_without_counts(plain), _without_counts(planned))
        if not difference:
            return Trial(name, Verdict.WARNED, warned, wanted)
    if difference:
        return Trial(name, Verdict.DIFFERENT, difference, wanted)
    if error is None:
        if plain_error is not None:
            return Trial(name, Verdict.DIFFERENT, "accepted, where plain PyTorch raises", wanted)
        return Trial(name, Verdict.EQUAL, "", "")
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, AutotuneError):
        return Trial(name, Verdict.REFUSED, text, wanted)
    if plain_error is not None and type(error) is type(plain_error) and len(plain) == len(planned):
        return Trial(name, Verdict.EQUAL, f"raises as plain PyTorch: {text}", wanted)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Trial(
        name, Verdict.CRASH, f"{text} (at {frame.name}, {frame.filename.rpartition('/')[2]}:{frame.lineno})", wanted
    )


def _run(case: Case, way: Way) -> tuple[list[torch.Tensor], Exception | None, str]:
    """Run a case; return what it yields, its exception, and the warning of a Python change that a plan does not repeat."""
    torch.manual_seed(5)
    yielded: list[torch.Tensor] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yielded.extend(part.detach().clone() for part in case(way))
        except Exception as error:  # noqa: BLE001 - every exception is a finding
            return yielded, error, ""
    effects = [str(each.message) for each in caught if issubclass(each.category, SideEffectWarning)]
    return [*yielded, torch.get_rng_state()], None, next(iter(effects), "")


def _without_counts(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results that a Python change, which a warning names, must not affect: all but single integers."""
    return [result for result in results if result.ndim or result.dtype is not torch.int64]


def _first_difference(plain: list[torch.Tensor], planned: list[torch.Tensor]) -> str:
    if len(plain) != len(planned):
        return f"{len(planned)} results, plain PyTorch has {len(plain)}"
    for position, (one, other) in enumerate(zip(plain, planned, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"result {position} of {len(plain)} has another shape or dtype"
        if not torch.equal(one.nan_to_num(), other.nan_to_num()) or not torch.equal(one.isnan(), other.isnan()):
            worst = (one.double() - other.double()).abs().nan_to_num(torch.inf).max().item()
            return f"result {position} of {len(plain)} differs by {worst:.2g}"
    return ""
