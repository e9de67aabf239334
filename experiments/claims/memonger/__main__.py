"""Gradient sharing on ResNet-50: the bytes of a training step in memonger's model, beside its own numbers.

`python -m experiments.claims.memonger [--batch 32] [--size 224] [--out results]`
"""

import argparse
import shlex
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.layout import Buffers, lay_out
from autotune.measure.device.this_device import this_device
from autotune.planners.inplace.greedy import GreedyInPlace
from autotune.records.json_codec import to_json
from autotune.report.claims import RESULT, Claim, Figure, read, write
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from experiments.claims.memonger.sharing.gradients import (
    blob_bytes,
    build_net,
    find_forward_values,
    find_gradients,
    share_buffers,
)
from experiments.claims.memonger.sharing.net import Net, blob_lives, count_bytes
from experiments.claims.memonger.sharing.objects import share_exactly, share_greedily
from experiments.claims.memonger.sharing.orders import depth_first, longest_chain_first
from experiments.claims.memonger.sharing.recycle import recycle, recycle_largest_first
from experiments.common.facts import collect_facts, list_arguments
from experiments.common.measured import PARTS
from experiments.common.result_file import write_result
from experiments.common.simulated import CAPTURED, collect_origin, open_figure

HERE = Path(__file__).parent
PUBLISHED = {"gradients": (7497, 5010), "with activations": (4800, 4330)}
"""ResNet-50 at batch 32, before and after, in MB of a whole GPU; the second pair is of a later day."""
SOURCE = "Caffe2's memonger, commit messages"
ORDERS = {"depth first": depth_first, "longest path": longest_chain_first}
SEGMENTED = 256
"""Side of the segmented image, in pixels."""
STATES = 10_000
"""Number of partial sharings that the exact search evaluates for the segmentation net."""
OWN_RULE = "memonger, with sizes"
"""Name of the sharing rule of memonger's authors. The claims compare its bytes."""
REPEATS = 5
"""Number of times that sharing is planned; the median counts."""


def capture_resnet50(**arguments: Any) -> TrainGraph:
    """Capture ResNet-50's training step on fake tensors: no weight is initialized and nothing allocated."""
    # the factory's cast and move change nothing here, and a fake parameter cannot be swapped for another
    with FakeTensorMode(), mock.patch.object(torch.nn.Module, "to", lambda model, **_: model):
        workload = ZOO["resnet50"](**arguments)
    graph = capture(workload, "resnet50").graph
    CAPTURED[f"resnet50 {arguments}"] = graph.digest
    return graph


def build_plans(graph: TrainGraph) -> dict[str, Plan]:
    """Return the traced plan, where every op makes a new tensor, and the plan with every possible op in place."""
    traced = Plan.traced(graph)
    return {"as traced": traced, "in place": GreedyInPlace().plan(graph, traced, 0, Costs.unit(graph))}


def measure_larger_batch(batch: int, size: int) -> dict[str, Any]:
    """Measure twice the batch, with ops in place."""
    graph = capture_resnet50(batch=2 * batch, size=size)
    return {"batch": 2 * batch, "plans": {"in place": measure(graph, build_plans(graph)["in place"])}}


def bytes_by_purpose(graph: TrainGraph, plan: Plan) -> dict[str, int]:
    """Return the bytes of all buffers by purpose."""
    nbytes: dict[str, int] = {}
    _, blobs = build_net(graph, plan)
    forward, backward = find_forward_values(graph), find_gradients(graph)
    for value in {blob: graph.values[number] for number, blob in reversed(list(enumerate(blobs)))}.values():
        match value.role:
            case Role.PARAM | Role.STATE | Role.BUFFER | Role.BATCH:
                name = value.role.value
            case Role.GRAD:
                name = "gradients of parameters"
            case _:
                name = "forward" if value.id in forward else "gradients" if value.id in backward else "update"
        nbytes[name] = nbytes.get(name, 0) + value.nbytes
    return nbytes


def measure(graph: TrainGraph, plan: Plan) -> dict[str, Any]:
    """Return one graph's bytes unshared, shared in each way, and in an arena."""
    net, blobs = build_net(graph, plan)
    nbytes = blob_bytes(graph, blobs)
    result: dict[str, Any] = {"parts": bytes_by_purpose(graph, plan), "unshared_bytes": count_bytes(nbytes)}
    for what, activations in (("gradients", False), ("with activations", True)):
        sharing_values = find_gradients(graph) | find_forward_values(graph) if activations else find_gradients(graph)
        shareable = set(blobs) - {blob for value, blob in enumerate(blobs) if value not in sharing_values}
        static = set(net.touched) - (net.movable & shareable)

        def fresh() -> Net:
            return build_net(graph, plan)[0]

        ways: dict[str, Callable[[], int]] = {
            "memonger, without sizes": lambda s=shareable: count_bytes(nbytes, recycle(fresh(), s)),
            "memonger, with sizes": lambda s=shareable: count_bytes(nbytes, recycle(fresh(), s, nbytes=nbytes)),
            "largest first": lambda s=shareable: count_bytes(nbytes, recycle_largest_first(fresh(), nbytes, s)),
            "the better of the two": lambda a=activations: share_buffers(graph, plan, activations=a).shared_bytes,
            "memonger's objects, one order": lambda s=static: (
                share_greedily(blob_lives(fresh(), nbytes), s).shared_bytes
            ),
            "exact objects, one order": lambda s=static: (
                share_exactly(blob_lives(fresh(), nbytes), s, states=1000).shared_bytes
            ),
        }
        rows = {name: time_planning(way) for name, way in ways.items()}
        bound = share_exactly(blob_lives(net, nbytes), static, states=1000).lower_bound_bytes
        result[what] = {"ways": rows, "lower_bound_bytes": bound}
    result["arena"] = measure_arena(net, nbytes)
    return result


def time_planning(way: Callable[[], int]) -> dict[str, Any]:
    """Return the bytes and the median seconds of planning."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        shared = way()
        seconds.append(time.perf_counter() - start)
    return {"shared_bytes": shared, "seconds": statistics.median(seconds)}


def measure_arena(net: Net, nbytes: dict[str, int]) -> dict[str, Any]:
    """Return the bytes of the same lives with all results of the step in one block, and their peak of live bytes."""
    end = len(net.ops)
    step_lives = [life for life in blob_lives(net, nbytes) if life.name not in net.inputs]
    born = [int(life.defined) for life in step_lives]
    died = [int(min(life.used, end)) + 1 for life in step_lives]
    sizes = [life.nbytes for life in step_lives]
    input_bytes = sum(nbytes[blob] for blob in net.inputs)
    laid_out = time_planning(lambda: input_bytes + lay_out(Buffers.from_lives(sizes, born, died)).bytes)
    return {**laid_out, "max_live_bytes": input_bytes + Buffers.from_lives(sizes, born, died).max_live}


def sharing_savings(graph_result: dict[str, Any]) -> dict[str, float]:
    """Return the saving of gradient sharing over none, and of activation sharing over gradient sharing."""
    first = graph_result["gradients"]["ways"]["the better of the two"]["shared_bytes"]
    second = graph_result["with activations"]["ways"]["the better of the two"]["shared_bytes"]
    return {"gradients": 1 - first / graph_result["unshared_bytes"], "with activations": 1 - second / first}


def claims_of(results: dict[str, Any]) -> list[Claim]:
    """Return memonger's numbers beside those of the graph with ops in place, as in Caffe2's net."""
    result = results["plans"]["in place"]
    first, second = (result[what]["ways"][OWN_RULE] for what in PUBLISHED)
    mib = [nbytes / 2**20 for nbytes in (result["unshared_bytes"], first["shared_bytes"], second["shared_bytes"])]
    net = f"ResNet-50, batch {results['batch']}, training"
    conditions = "every buffer of the step by its shape, ops in place, shared by memonger's own rule; theirs is what a whole GPU holds"
    claims = [
        Claim(
            f"{net}: {what} shared", source, conditions, "MiB", Figure(after, before), Figure(ours, ours_before),
            sense="at most", headline=True,
        )
        for (what, (before, after)), source, ours_before, ours in zip(
            PUBLISHED.items(), (f"{SOURCE}, 2017-01", f"{SOURCE}, 2017-04"), mib, mib[1:], strict=False
        )
    ]  # fmt: skip
    claims.append(
        Claim(
            f"{net}: planning", SOURCE, "median of five; theirs in Python, for each GPU", "s", Figure(0.25),
            Figure(first["seconds"]), sense="at most", transferred=True, kind="measured",
        )
    )  # fmt: skip
    return [*claims, *claims_of_larger(results), *claims_of_segmentation(results["segmentation"])]


def claims_of_larger(results: dict[str, Any]) -> list[Claim]:
    """Return the claim at twice the batch, where memonger's authors report activations alone."""
    result = results["larger"]["plans"]["in place"]
    before, after = (result[what]["ways"][OWN_RULE]["shared_bytes"] / 2**30 for what in PUBLISHED)
    return [
        Claim(
            f"ResNet-50, batch {results['larger']['batch']}, training: with activations shared", f"{SOURCE}, 2017-04",
            "every buffer of the step by its shape, ops in place, shared by memonger's own rule; theirs, Gig, is what a whole GPU holds", "GiB",
            Figure(8.5, 9.45), Figure(after, before), sense="at most",
        )
    ]  # fmt: skip


def claims_of_segmentation(result: dict[str, Any]) -> list[Claim]:
    """Return our figures beside the published ones of an unpublished net."""
    why_not = "the net is not published"
    conditions = (
        f"inference; theirs of 33 MB; ours SegFormer-B0 on one image of {result['size']}, {result['blobs']} blobs that may share, "
        f"{result['unshared_bytes'] / 1e6:.1f} MB of them, and a search that would be exact in place of the dynamic program, whose "
        "time is exponential in what lives at once"
    )
    rows = result["rows"]
    depth, longest = (rows[f"greedy, {order}"]["shared_bytes"] / 1e6 for order in ORDERS)
    best = rows["exact, longest path"]
    about = partial(Claim, source=SOURCE, conditions=conditions, why_not=why_not)
    return [
        Claim(
            "segmentation net, longest path", SOURCE, f"{conditions}; their net is not published, and on ours this order saves little",
            "MB", Figure(14, 21.7), Figure(longest, depth), tolerance=0.1, sense="at most",
        ),
        about(
            "segmentation net, dynamic program against greedy", unit="MB", published=Figure(12.08, 14.96),
            ours=Figure(best["shared_bytes"] / 1e6, longest),
        ),
        about(
            "segmentation net, dynamic program, 55 blobs: planning", unit="s", published=Figure(15),
            ours=Figure(best["seconds"]), kind="measured",
        ),
    ]  # fmt: skip


def capture_segmentation(size: int) -> TrainGraph:
    """Capture SegFormer's inference on an image of this size, on fake tensors."""
    with FakeTensorMode(), mock.patch.object(torch.nn.Module, "to", lambda model, **_: model):
        workload = ZOO["segformer"](batch=1, size=size)
        graph = capture(Workload(Logits(workload.model).eval(), batch=workload.batch[0]), "segformer").graph
    CAPTURED["segformer"] = graph.digest
    return graph


def measure_segmentation(size: int) -> dict[str, Any]:
    """Measure SegFormer's inference: blobs shared greedily in two orders and by an exact search, static bytes excluded."""
    graph = capture_segmentation(size)
    net, blobs = build_net(graph, build_plans(graph)["in place"])
    nbytes = blob_bytes(graph, blobs)
    static = set(net.touched) - net.movable
    static_bytes = sum(nbytes[blob] for blob in static)
    lives_by_order = {name: blob_lives(net.reordered(order(net)), nbytes) for name, order in ORDERS.items()}
    ways = {
        f"greedy, {name}": partial(share_greedily, lives_in_order, static)
        for name, lives_in_order in lives_by_order.items()
    }
    ways["exact, longest path"] = partial(share_exactly, lives_by_order["longest path"], static, STATES)
    return {
        "size": size,
        "blobs": len(net.movable),
        "unshared_bytes": sum(nbytes[blob] for blob in net.movable),
        "rows": {name: time_planning(lambda way=way: way().shared_bytes - static_bytes) for name, way in ways.items()},
    }


class Logits(torch.nn.Module):
    """Segmentation model of transformers as a function from images to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(images).logits
        return logits


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the bytes of the step, from no sharing to one block."""
    with open_figure(path, len(results["plans"])) as axes:
        for ax, (name, result) in zip(axes, results["plans"].items(), strict=True):
            bars = {"unshared": result["unshared_bytes"]} | {
                f"{what} shared": result[what]["ways"]["the better of the two"]["shared_bytes"] for what in PUBLISHED
            }
            bars |= {"arena": result["arena"]["shared_bytes"]}
            ax.bar(list(bars), [nbytes / 2**20 for nbytes in bars.values()])
            ax.set(title=f"ResNet-50, batch {results['batch']}, {name}", ylabel="MiB")
            ax.tick_params("x", labelrotation=20)


def summary(results: dict[str, Any]) -> str:
    """Format the page beside `results.json`."""
    device = results["device"]
    lines = [
        f"ResNet-50, batch {results['batch']}, images of {results['size']}: {results['ops']} ops, bytes by shapes, nothing run.",
        f"{device['silicon']}, cores: {device['cores']}, torch {device['torch']}; made by {results['command']}",
        "",
    ]
    for name, result in results["plans"].items():
        lines += [
            f"## {name}",
            "",
            f"Unshared {result['unshared_bytes']:,} bytes ({_mib(result['unshared_bytes'])} MiB): ",
        ]
        lines[-1] += ", ".join(f"{part} {_mib(nbytes)}" for part, nbytes in result["parts"].items()) + " MiB."
        saved = sharing_savings(result)
        for what, (before, after) in PUBLISHED.items():
            lines += [
                "",
                f"Saving, {what}: {saved[what]:.1%}; memonger's own {before} -> {after}, {1 - after / before:.1%}.",
            ]
        lines += ["", "| shared | how | bytes | MiB | of unshared | planning s |", "|---|---|--:|--:|--:|--:|"]
        for what in PUBLISHED:
            for way, row in result[what]["ways"].items():
                lines.append(_row(what, way, row["shared_bytes"], result["unshared_bytes"], f"{row['seconds']:.3f}"))
            lines.append(
                _row(what, "proved bound, one order", result[what]["lower_bound_bytes"], result["unshared_bytes"], "")
            )
        laid_out = result["arena"]
        lines.append(
            _row(
                "everything", "arena", laid_out["shared_bytes"], result["unshared_bytes"], f"{laid_out['seconds']:.3f}"
            )
        )
        lines += [_row("everything", "lives at once", laid_out["max_live_bytes"], result["unshared_bytes"], ""), ""]
    return "\n".join(lines)


def _row(what: str, way: str, nbytes: int, unshared: int, seconds: str) -> str:
    return f"| {what} | {way} | {nbytes:,} | {_mib(nbytes)} | {nbytes / unshared:.1%} | {seconds} |"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="without measured: no seconds anew")
    options = parser.parse_args()
    facts = collect_facts()
    graph = capture_resnet50(batch=options.batch, size=options.size)
    results = {
        "device": to_json(this_device("cpu")),
        "command": f"`{shlex.join(['python', '-m', 'experiments.claims.memonger', *list_arguments()])}`",
        "batch": options.batch,
        "size": options.size,
        "ops": len(graph.ops),
        "plans": {name: measure(graph, plan) for name, plan in build_plans(graph).items()},
        "larger": measure_larger_batch(options.batch, options.size),
        "segmentation": measure_segmentation(SEGMENTED),
    }
    updates_claims = options.out / RESULT.name == HERE / RESULT
    if "measured" not in options.parts:
        if updates_claims:  # beside other work its planners take longer than they do
            seconds = [claim for claim in read(HERE) if claim.kind == "measured"]
            write(
                HERE,
                [*(claim for claim in claims_of(results) if claim.kind != "measured"), *seconds],
                {"simulated": collect_origin()},
            )
        return
    options.out.mkdir(parents=True, exist_ok=True)
    write_result(options.out / "results.json", collect_origin(facts) | results, CAPTURED)
    (options.out / "summary.md").write_text(summary(results), encoding="utf-8")
    draw(results, options.out / "shared.png")
    if updates_claims:
        origin = collect_origin(facts)
        write(HERE, claims_of(results), {"simulated": origin, "measured": origin})
    print(summary(results))


if __name__ == "__main__":
    main()
