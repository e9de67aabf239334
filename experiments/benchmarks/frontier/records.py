"""Read a model's record, and compare its plans with its peers.

A record is the dictionary of a result file. A *peer* is eager or one of PyTorch's methods, a *capture* is the step on one kind of
kernels in one memory format, and a *variant* is a peer or a plan.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scipy.optimize import isotonic_regression

from autotune.measure.interleaving import EAGER, pair_with_baseline, ratios_to_baseline
from autotune.study.verdicts.statistics import Interval, median_interval

GLIBC = " glibc"
"""End of the name of a peer that runs with glibc's malloc; the others run with tcmalloc."""
CHANNELS_LAST = " channels_last"
"""End of the name of a peer in that memory format, before `GLIBC`; the others run in the model's own."""
SHARES = (0.6, 0.5, 0.4)
"""Budgets of plans beside the peers' peaks, as shares of eager's peak."""
MERGED = 0.01
"""Relative distance of budgets below which the smaller one's plan serves both."""
SLACK = 1.005
"""Ratio to a peer's bytes up to which a plan of ours is compared with it."""
SLOWER = 1.03
"""Ratio to the lowest estimated seconds within a peer's bytes up to which a plan is timed: estimates may be wrong by so much."""
OTHER_KERNELS = 1.25
"""The same for a plan on the other kind of kernels, for which estimates are wrong by more."""
NEARLY_EAGER = 1.03
"""Ratio to eager's time up to which a plan counts as nearly as fast."""
WRONG, ROUNDINGS = 0.01, 10.0
"""Relative error of a gradient that is more than rounding, and the factor over the effect of one ulp in every parameter."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Our fastest plan within the bytes of one peer, and its time over the peer's."""

    model: str
    peer: str
    ours: str
    ratio: Interval
    """By blocks of one round, with tcmalloc for the peer."""
    ratio_glibc: Interval | None = None
    """The same with glibc's malloc for the peer; without a number of samples where the two were timed in different sessions."""


@dataclass(frozen=True, slots=True)
class VariantPoint:
    """Bytes and time of one variant of one model."""

    variant: str
    kind: Literal["eager", "peer", "compiler", "ours"]
    """Group of the variant; a compiler's kernels differ from eager's."""
    peak_bytes: int
    """Peak of the step, with malloc returning memory at once."""
    charged_bytes: int | None = None
    """Charge of a peer's step with glibc's malloc."""
    ratio: Interval | None = None
    """Time over eager's, with tcmalloc."""
    right: bool = True
    """True if it computes the same as eager; a plan of ours the same bits as the traced step of its capture."""


def method_of(peer: str) -> str:
    """Return the method of a peer, in whatever memory format it runs.

    >>> method_of("inductor 0.5 channels_last")
    'inductor 0.5'
    """
    return peer.removesuffix(CHANNELS_LAST)


def describe_method(peer: str) -> str:
    """Return words for a peer and its memory format.

    >>> describe_method("inductor 0.5 channels_last"), describe_method("inductor 1")
    ('`torch.compile` with a memory budget of 0.5, in channels_last', '`torch.compile` without a memory budget')
    """
    kind, _, budget = method_of(peer).partition(" ")
    words = {"eager": "plain PyTorch", "selective": "selective checkpoint", "inductor": "`torch.compile`"}.get(
        kind, kind
    )
    if budget:
        words += " without a memory budget" if float(budget) == 1 else f" with a memory budget of {budget}"
    return f"{words}, in {format_of(peer)}" if format_of(peer) else words


def format_of(peer: str) -> str:
    """Return the name of a peer's memory format, as `Spec` has it; empty for the model's own."""
    return CHANNELS_LAST.strip() if peer.endswith(CHANNELS_LAST) else ""


def ratios_by_round(record: dict[str, Any], variant: str) -> dict[tuple[int, int], float]:
    """Return a variant's ratio to eager in each block, by session and round. A session in which it failed is left out."""
    ratios: dict[tuple[int, int], float] = {}
    for number, session in enumerate(record["sessions"]):
        if variant in session["failed"]:
            continue
        blocks = [(block["variant"], block["seconds"]) for block in session["blocks"]]
        rounds = [block["round"] for block in session["blocks"] if block["variant"] == variant]
        found = ratios_to_baseline(pair_with_baseline(blocks, variant))
        ratios |= {(number, turn): ratio for turn, ratio in zip(rounds, found, strict=True)}
    return ratios


def time_ratio(record: dict[str, Any], variant: str) -> Interval | None:
    """Return a variant's time over eager's; None where it was not timed."""
    ratios = ratios_by_round(record, variant)
    return median_interval(list(ratios.values())) if ratios else None


def compare_variants(record: dict[str, Any], variant: str, other: str) -> Interval | None:
    """Return a variant's time over another one's, by the rounds that both have; None without a common round."""
    ratios, others = ratios_by_round(record, variant), ratios_by_round(record, other)
    quotients = [ratios[key] / others[key] for key in sorted(ratios.keys() & others.keys())]
    return median_interval(quotients) if quotients else None


def glibc_charge(record: dict[str, Any], peer: str) -> int | None:
    """Return the charge of a peer's step with glibc's malloc in its latest session; None where it was not timed.

    tcmalloc keeps freed pages, so the bytes charged to an idle process cannot serve as its floor.
    """
    charges = (session.get("charged", {}).get(f"{peer}{GLIBC}") for session in reversed(record["sessions"]))
    return next((charge for charge in charges if charge is not None), None)


def timed_variants(record: dict[str, Any]) -> set[str]:
    """Return the variants that a session timed, or that failed in it.

    A failure for lack of memory counts only the second time, because the other variants of the session take memory, too.
    """
    timed, short = set[str](), set[str]()
    for session in record["sessions"]:
        again = {name for name, reason in session["failed"].items() if reason.startswith("out_of_memory")} - short
        timed |= ({block["variant"] for block in session["blocks"]} | session["failed"].keys()) - again
        short |= again
    return timed


def is_wrong(record: dict[str, Any], peer: str) -> bool:
    """Return True if a peer's gradients differ from eager's by more than rounding."""
    if method_of(peer) == EAGER:
        return False
    error, rounding = (
        gradient_error(errors) for errors in (record["peers"][peer].get("errors", {}), record.get("rounding", {}))
    )
    return not error <= max(WRONG, ROUNDINGS * rounding)


def gradient_error(errors: dict[str, Any]) -> float:
    """Return the largest error of a gradient. Results before 26 November 2026 hold those of the steps under `loss`."""
    kinds = [errors[kind] for kind in ("loss", "gradients") if kind in errors]
    return max(
        (kind["error"] for kind in kinds if "gradient" in kind["worst"] or kind["error"] == math.inf), default=0.0
    )


def make_budgets(record: dict[str, Any], shares: Sequence[float] = ()) -> list[int]:
    """Return the peers' peaks and shares of eager's peak in bytes, the highest first, without those within 1 % of a smaller one.

    A plan is admitted at up to `SLACK` times its budget, and must not exceed its share.
    """
    eager: int = record["peers"].get(EAGER, {}).get("step_peak_bytes", 0)
    peaks = [peer["step_peak_bytes"] for peer in record["peers"].values() if "step_peak_bytes" in peer]
    kept: list[int] = []
    for budget in sorted([*peaks, *(int(share * eager / SLACK) for share in shares if eager)]):
        if not kept or budget > kept[-1] * (1 + MERGED):
            kept.append(budget)
    return kept[::-1]


def fitting_plans(record: dict[str, Any], nbytes: int, names: Iterable[str]) -> list[str]:
    """Return for each capture its largest plan of at most `nbytes` that has the traced step's bits."""
    plans, fitting = record["plans"], dict[str, str]()
    for name in sorted(names, key=lambda name: plans[name]["step_peak_bytes"]):
        if plans[name]["equal_to_traced"] and plans[name]["step_peak_bytes"] <= SLACK * nbytes:
            fitting[capture_of(record, name)] = name
    return list(fitting.values())


def fast_plans(record: dict[str, Any], slower: float = SLOWER, form: str = "") -> list[str]:
    """Return the plans to time: within each budget, those that are fastest by estimate, or nearly so; and the lowest.

    `slower` is the ratio to the lowest estimated seconds up to which a plan is nearly as fast. Eager's and compiled kernels are
    compared by a larger one. `form` is the end of names of a memory format, to which the plans are limited.
    """
    plans = record["plans"]
    seconds = {name: plan["estimate"]["seconds"] for name, plan in plans.items() if "estimate" in plan and form in name}
    fast: list[str] = []
    for budget in make_budgets(record, SHARES):
        fitting = fitting_plans(record, budget, seconds)
        least = min((seconds[name] for name in fitting), default=0.0)
        for is_compiled in (False, True):
            alike = [name for name in fitting if ("inductor" in name) == is_compiled]
            first = min((seconds[name] for name in alike), default=math.inf)
            fast += [name for name in alike if first <= OTHER_KERNELS * least and seconds[name] <= slower * first]
    equal = [name for name in seconds if plans[name]["equal_to_traced"]]
    lowest = min(equal, key=lambda name: plans[name]["step_peak_bytes"], default=None)
    return list(dict.fromkeys([*fast, *([lowest] if lowest else [])]))


def thin_plans(record: dict[str, Any], names: Sequence[str], every: int) -> list[str]:
    """Return the largest, every n-th smaller and the smallest plan of each capture."""
    kept: set[str] = set()
    for capture in {capture_of(record, name) for name in names}:
        alike = [name for name in names if capture_of(record, name) == capture]
        alike.sort(key=lambda name: record["plans"][name]["step_peak_bytes"], reverse=True)
        kept |= {*alike[::every], alike[-1]}
    return [name for name in names if name in kept]


def capture_of(record: dict[str, Any], plan: str) -> str:
    """Return the name of a plan's capture: the longest one that the plan's name begins with."""
    return max((name for name in record["captures"] if plan.startswith(name)), key=len, default="")


def compare(model: str, record: dict[str, Any]) -> list[Pair]:
    """Pair each timed peer with right gradients with our fastest plan within its bytes.

    A method that was timed in two memory formats is a peer in its faster one. Of several plans that are equally fast, one seems faster by luck. So each capture enters with one plan, its largest within
    the bytes. Which capture is compared in a round is decided by the other rounds alone.
    """
    timed = {plan: ratios for plan in record["plans"] if (ratios := ratios_by_round(record, plan))}
    slower = slower_formats(record)
    pairs = []
    for peer, measured in record["peers"].items():
        theirs = _peer_ratios(record, peer)
        beside = [plan for plan, ratios in timed.items() if ratios.keys() & theirs.keys()]
        fitting = fitting_plans(record, measured.get("step_peak_bytes", 0), beside)
        if is_wrong(record, peer) or not fitting or peer in slower:
            continue
        candidates = {plan: timed[plan] for plan in fitting}
        ratio = _quotient(candidates, theirs)
        if ratio is not None:
            fastest = min(candidates, key=lambda plan: statistics.median(candidates[plan].values()))
            glibc = _quotient(candidates, ratios_by_round(record, f"{peer}{GLIBC}"))
            glibc = glibc or _divide(time_ratio(record, fastest), time_ratio(record, f"{peer}{GLIBC}"))
            pairs.append(Pair(model, peer, fastest, ratio, glibc))
    return pairs


def slower_formats(record: dict[str, Any]) -> set[str]:
    """Return the peers whose method is faster in the other memory format, by the medians of their times."""
    times: dict[str, list[tuple[float, str]]] = {}
    for peer in record["peers"]:
        ratios = _peer_ratios(record, peer)
        if ratios and not is_wrong(record, peer):
            times.setdefault(method_of(peer), []).append((statistics.median(ratios.values()), peer))
    return {peer for timed in times.values() for _, peer in sorted(timed)[1:]}


def runs_in_more_formats(record: dict[str, Any]) -> bool:
    """Return True if plans were timed in channels_last, and no peer was."""
    timed = timed_variants(record)
    plans = any(CHANNELS_LAST in plan for plan in record["plans"] if plan in timed)
    return plans and not any(format_of(peer) for peer in record["peers"] if peer in timed)


def find_unmatched(record: dict[str, Any]) -> dict[str, str]:
    """Return each peer that `compare` pairs with no plan, and why, in a record with times.

    Peers with wrong gradients are left out.
    """
    if not record["sessions"]:
        return {}
    timed = [plan for plan in record["plans"] if ratios_by_round(record, plan)]
    paired = {pair.peer for pair in compare("", record)}
    reasons = {}
    for peer, measured in record["peers"].items():
        failures = (session["failed"].get(peer) for session in record["sessions"])
        if peer in paired or is_wrong(record, peer) or peer in slower_formats(record):
            continue
        if "step_peak_bytes" not in measured:
            reasons[peer] = measured.get("failed", "its bytes were not measured")
        elif not _peer_ratios(record, peer):
            reasons[peer] = next(filter(None, failures), "not timed with tcmalloc")
        elif not fitting_plans(record, measured["step_peak_bytes"], timed):
            reasons[peer] = "no timed plan is as small"
        else:
            reasons[peer] = "no session timed it beside the plans"
    return reasons


def _peer_ratios(record: dict[str, Any], peer: str) -> dict[tuple[int, int], float]:
    if peer != EAGER:
        return ratios_by_round(record, peer)
    sessions = enumerate(record["sessions"])
    return {(number, block["round"]): 1.0 for number, session in sessions for block in session["blocks"]}


def _quotient(
    candidates: Mapping[str, Mapping[tuple[int, int], float]], others: Mapping[tuple[int, int], float]
) -> Interval | None:
    """Return the time of the fastest candidate over another variant's; None without a round that all of them have.

    Keys are (session, round), values times over eager's. The candidate of a round is the fastest one in all other rounds.
    """
    common = set(others).intersection(*candidates.values())
    quotients = []
    for turn in sorted(common):
        medians = {
            plan: statistics.median([ratio for other, ratio in ratios.items() if other != turn] or [ratios[turn]])
            for plan, ratios in candidates.items()
        }
        quotients.append(candidates[min(medians, key=medians.__getitem__)][turn] / others[turn])
    return median_interval(quotients) if quotients else None


def _divide(ours: Interval | None, theirs: Interval | None) -> Interval | None:
    """Return the quotient of two ratios to eager of different sessions, with the farthest ends; None where one is missing.

    >>> _divide(Interval(0.9, 0.8, 1.0), Interval(1.8, 1.6, 2.0))
    Interval(middle=0.5, low=0.4, high=0.625, samples=0, confidence=None)
    """
    if ours is None or theirs is None:
        return None
    return Interval(ours.middle / theirs.middle, ours.low / theirs.high, ours.high / theirs.low)


def compare_lowest(record: dict[str, Any]) -> tuple[float, float] | None:
    """Return our lowest peak, and the lowest proved bound of any plan, over the peers' lowest peak."""
    peers = [
        peer["step_peak_bytes"]
        for name, peer in record["peers"].items()
        if "step_peak_bytes" in peer and not is_wrong(record, name)
    ]
    ours = [plan["step_peak_bytes"] for plan in record["plans"].values() if plan["equal_to_traced"]]
    bounds = [capture["bound_bytes"] for capture in record["captures"].values() if "bound_bytes" in capture]
    if not (peers and ours and bounds):
        return None
    return min(ours) / min(peers), min(bounds) / min(peers)


def faster_eager(record: dict[str, Any]) -> str:
    """Return the name of eager in the memory format in which it is faster, of those that it was timed in."""
    slower = slower_formats(record)
    timed = [peer for peer in record["peers"] if method_of(peer) == EAGER and _peer_ratios(record, peer)]
    return next((peer for peer in timed if peer not in slower), EAGER)


def peak_near_eager_time(record: dict[str, Any]) -> float | None:
    """Return our lowest peak over eager's at no more than 1.03 times eager's time; None where no plan is as fast.

    Eager runs in its faster memory format. A plan that no session timed beside it is compared by the two ratios to eager in
    the model's own format.

    Plans of one capture are chosen so that fewer bytes never need less time. So their measured times are fitted to rise as
    bytes fall (isotonic regression). Otherwise one lucky measurement would stand for all its neighbours.
    """
    name_of_eager = faster_eager(record)
    eager = record["peers"].get(name_of_eager, {}).get("step_peak_bytes")
    theirs = _peer_ratios(record, name_of_eager)
    by_capture: dict[str, list[tuple[int, float]]] = {}
    for name, plan in record["plans"].items():
        if plan["equal_to_traced"] and "estimate" in plan and (ratios := ratios_by_round(record, name)):
            beside = [ratios[key] / theirs[key] for key in ratios.keys() & theirs.keys()]
            ratio = statistics.median(beside or ratios.values()) / (
                1.0 if beside else statistics.median(theirs.values())
            )
            point = (plan["step_peak_bytes"], ratio)
            by_capture.setdefault(capture_of(record, name), []).append(point)
    fitting = []
    for points in by_capture.values():
        points.sort(reverse=True)
        fitted = isotonic_regression([ratio for _, ratio in points]).x
        fitting += [nbytes for (nbytes, _), ratio in zip(points, fitted, strict=True) if ratio <= NEARLY_EAGER]
    return min(fitting) / eager if fitting and eager else None


def build_points(record: dict[str, Any]) -> list[VariantPoint]:
    """Return every variant of a model's record whose bytes are known, eager first."""
    points = []
    for name, measured in {**record["peers"], **record["plans"]}.items():
        if "step_peak_bytes" not in measured:
            continue
        is_ours = name in record["plans"]
        kind = "ours" if is_ours else "eager" if name == EAGER else "compiler" if "inductor" in name else "peer"
        points.append(
            VariantPoint(
                name,
                kind,  # type: ignore[arg-type]
                measured["step_peak_bytes"],
                None if is_ours else glibc_charge(record, name),
                time_ratio(record, name),
                right=measured["equal_to_traced"] if is_ours else not is_wrong(record, name),
            )
        )
    return points
