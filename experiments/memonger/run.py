"""Gradient sharing on ResNet-50: the bytes that memonger's model takes for a training step, beside its own numbers.

`python experiments/memonger/run.py [--batch 32] [--size 224] [--out results]`
"""

import argparse
import json
import shlex
import statistics
import sys
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
from autotune.planners.inplace.greedy import Greedy
from autotune.records.json_codec import to_json
from autotune.report.claims import RESULT, Claim, Figure, read, write
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from measured import PARTS
from simulated import picture

from experiments.memonger.sharing.gradients import blob_bytes, gradients, made_forward, net_of, share
from experiments.memonger.sharing.net import Net, held_bytes, lives
from experiments.memonger.sharing.objects import exact, greedy
from experiments.memonger.sharing.orders import depth_first, longest_chain_first
from experiments.memonger.sharing.recycle import recycle, recycle_largest_first

HERE = Path(__file__).parent
PUBLISHED = {"gradients": (7497, 5010), "with activations": (4800, 4330)}
"""What memonger's authors tell of ResNet-50 at batch 32, before and after, in MB of a whole GPU; the second is of a later day."""
SOURCE = "Caffe2's memonger, commit messages"
ORDERS = {"depth first": depth_first, "longest path": longest_chain_first}
SEGMENTED = 256
"""Side of the image that is cut into parts."""
STATES = 10_000
"""Partial sharings that the exact search looks at there."""
REPEATS = 5
"""Times that sharing is planned; the median counts."""


def captured(**arguments: Any) -> TrainGraph:
    """ResNet-50's training step on fake tensors: no weight is drawn and nothing allocated."""
    # the factory's cast and move change nothing here, and a fake parameter cannot be swapped for another
    with FakeTensorMode(), mock.patch.object(torch.nn.Module, "to", lambda model, **_: model):
        workload = ZOO["resnet50"](**arguments)
    return capture(workload, "resnet50").graph


def plans(graph: TrainGraph) -> dict[str, Plan]:
    """The graph as it was traced, where every op makes a new tensor, and with every op in place that may be."""
    traced = Plan.traced(graph)
    return {"as traced": traced, "in place": Greedy().plan(graph, traced, 0, Costs.unit(graph))}


def larger(batch: int, size: int) -> dict[str, Any]:
    """At twice the batch, with ops in place."""
    graph = captured(batch=2 * batch, size=size)
    return {"batch": 2 * batch, "graphs": {"in place": measure(graph, plans(graph)["in place"])}}


def parts(graph: TrainGraph, plan: Plan) -> dict[str, int]:
    """Bytes by what they are for, every buffer once."""
    found: dict[str, int] = {}
    _, blobs = net_of(graph, plan)
    forward, backward = made_forward(graph), gradients(graph)
    for value in {blob: graph.values[number] for number, blob in reversed(list(enumerate(blobs)))}.values():
        match value.role:
            case Role.PARAM | Role.STATE | Role.BUFFER | Role.BATCH:
                name = value.role.value
            case Role.GRAD:
                name = "gradients of parameters"
            case _:
                name = "forward" if value.id in forward else "gradients" if value.id in backward else "update"
        found[name] = found.get(name, 0) + value.nbytes
    return found


def measure(graph: TrainGraph, plan: Plan) -> dict[str, Any]:
    """One graph: what it takes unshared, shared in each way, and in an arena."""
    net, blobs = net_of(graph, plan)
    nbytes = blob_bytes(graph, blobs)
    found: dict[str, Any] = {"parts": parts(graph, plan), "unshared_bytes": held_bytes(nbytes)}
    for what, activations in (("gradients", False), ("with activations", True)):
        wanted = gradients(graph) | made_forward(graph) if activations else gradients(graph)
        shareable = set(blobs) - {blob for value, blob in enumerate(blobs) if value not in wanted}
        static = set(net.touched) - (net.movable & shareable)

        def fresh() -> Net:
            return net_of(graph, plan)[0]

        ways: dict[str, Callable[[], int]] = {
            "memonger, without sizes": lambda s=shareable: held_bytes(nbytes, recycle(fresh(), s)),
            "memonger, with sizes": lambda s=shareable: held_bytes(nbytes, recycle(fresh(), s, nbytes=nbytes)),
            "largest first": lambda s=shareable: held_bytes(nbytes, recycle_largest_first(fresh(), nbytes, s)),
            "the better of the two": lambda a=activations: share(graph, plan, activations=a).shared_bytes,
            "memonger's objects, one order": lambda s=static: greedy(lives(fresh(), nbytes), s).shared_bytes,
            "exact objects, one order": lambda s=static: exact(lives(fresh(), nbytes), s, states=1000).shared_bytes,
        }
        rows = {name: timed(way) for name, way in ways.items()}
        bound = exact(lives(net, nbytes), static, states=1000).lower_bound_bytes
        found[what] = {"ways": rows, "lower_bound_bytes": bound}
    found["arena"] = arena(net, nbytes)
    return found


def timed(way: Callable[[], int]) -> dict[str, Any]:
    """Bytes, and the seconds that planning took."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        shared = way()
        seconds.append(time.perf_counter() - began)
    return {"shared_bytes": shared, "seconds": statistics.median(seconds)}


def arena(net: Net, nbytes: dict[str, int]) -> dict[str, Any]:
    """The same lives, everything that the step makes in one block: what lives at once, and what its layout takes."""
    end = len(net.ops)
    made = [life for life in lives(net, nbytes) if life.name not in net.inputs]
    born = [int(life.defined) for life in made]
    died = [int(min(life.used, end)) + 1 for life in made]
    sizes = [life.nbytes for life in made]
    own = sum(nbytes[blob] for blob in net.inputs)
    laid_out = timed(lambda: own + lay_out(Buffers.of(sizes, born, died)).bytes)
    return {**laid_out, "max_live_bytes": own + Buffers.of(sizes, born, died).max_live}


def savings(found: dict[str, Any]) -> dict[str, float]:
    """The saving of gradient sharing against none, and the further one of activations against memonger's on gradients."""
    first = found["gradients"]["ways"]["the better of the two"]["shared_bytes"]
    second = found["with activations"]["ways"]["the better of the two"]["shared_bytes"]
    return {"gradients": 1 - first / found["unshared_bytes"], "with activations": 1 - second / first}


def claims_of(results: dict[str, Any]) -> list[Claim]:
    """memonger's own numbers beside those of the graph with ops in place, as Caffe2's net has them."""
    found = results["graphs"]["in place"]
    first, second = (found[what]["ways"]["the better of the two"] for what in PUBLISHED)
    mib = [nbytes / 2**20 for nbytes in (found["unshared_bytes"], first["shared_bytes"], second["shared_bytes"])]
    net = f"ResNet-50, batch {results['batch']}, training"
    how = "every buffer of the step by its shape, ops in place; theirs is what a whole GPU holds"
    claims = [
        Claim(
            f"{net}: {what} shared", source, how, "MiB", Figure(after, before), Figure(ours, ours_before),
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
    """At twice the batch, where memonger's authors tell of activations alone."""
    found = results["larger"]["graphs"]["in place"]
    before, after = (found[what]["ways"]["the better of the two"]["shared_bytes"] / 2**30 for what in PUBLISHED)
    return [
        Claim(
            f"ResNet-50, batch {results['larger']['batch']}, training: with activations shared", f"{SOURCE}, 2017-04",
            "every buffer of the step by its shape, ops in place; theirs, Gig, is what a whole GPU holds", "GiB",
            Figure(8.5, 9.45), Figure(after, before), sense="at most",
        )
    ]  # fmt: skip


def claims_of_segmentation(found: dict[str, Any]) -> list[Claim]:
    """Ours beside what is told of a net that nobody published."""
    unknown = "the net is not published"
    how = (
        f"inference; theirs of 33 MB; ours SegFormer-B0 on one image of {found['size']}, {found['blobs']} blobs that may share, "
        f"{found['unshared_bytes'] / 1e6:.1f} MB of them, and a search that would be exact in place of the dynamic program, whose "
        "time is exponential in what lives at once"
    )
    rows = found["rows"]
    depth, longest = (rows[f"greedy, {order}"]["shared_bytes"] / 1e6 for order in ORDERS)
    best = rows["exact, longest path"]
    about = partial(Claim, source=SOURCE, conditions=how, why_not=unknown)
    return [
        about("segmentation net, longest path", unit="MB", published=Figure(14, 21.7), ours=Figure(longest, depth)),
        about(
            "segmentation net, dynamic program against greedy", unit="MB", published=Figure(12.08, 14.96),
            ours=Figure(best["shared_bytes"] / 1e6, longest),
        ),
        about(
            "segmentation net, dynamic program, 55 blobs: planning", unit="s", published=Figure(15),
            ours=Figure(best["seconds"]), kind="measured",
        ),
    ]  # fmt: skip


def segmentation(size: int) -> dict[str, Any]:
    """SegFormer's inference, its blobs shared greedily in two orders and by an exact search; its own bytes left out."""
    with FakeTensorMode(), mock.patch.object(torch.nn.Module, "to", lambda model, **_: model):
        workload = ZOO["segformer"](batch=1, size=size)
        graph = capture(Workload(Logits(workload.model).eval(), batch=workload.batch[0]), "segformer").graph
    net, blobs = net_of(graph, plans(graph)["in place"])
    nbytes = blob_bytes(graph, blobs)
    static = set(net.touched) - net.movable
    own = sum(nbytes[blob] for blob in static)
    alive = {name: lives(net.reordered(order(net)), nbytes) for name, order in ORDERS.items()}
    ways = {f"greedy, {name}": partial(greedy, found, static) for name, found in alive.items()}
    ways["exact, longest path"] = partial(exact, alive["longest path"], static, STATES)
    return {
        "size": size,
        "blobs": len(net.movable),
        "unshared_bytes": sum(nbytes[blob] for blob in net.movable),
        "rows": {name: timed(lambda way=way: way().shared_bytes - own) for name, way in ways.items()},
    }


class Logits(torch.nn.Module):
    """A model of transformers as a function from images to maps."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.model(images).logits
        return made


def draw(results: dict[str, Any], path: Path) -> None:
    """Bytes of the step, nothing shared to everything in one block."""
    with picture(path, len(results["graphs"])) as axes:
        for one, (name, found) in zip(axes, results["graphs"].items(), strict=True):
            bars = {"unshared": found["unshared_bytes"]} | {
                f"{what} shared": found[what]["ways"]["the better of the two"]["shared_bytes"] for what in PUBLISHED
            }
            bars |= {"arena": found["arena"]["shared_bytes"]}
            one.bar(list(bars), [nbytes / 2**20 for nbytes in bars.values()])
            one.set(title=f"ResNet-50, batch {results['batch']}, {name}", ylabel="MiB")
            one.tick_params("x", labelrotation=20)


def summary(results: dict[str, Any]) -> str:
    """The page beside `results.json`."""
    device = results["device"]
    lines = [
        f"ResNet-50, batch {results['batch']}, images of {results['size']}: {results['ops']} ops, bytes by shapes, nothing run.",
        f"{device['silicon']}, cores: {device['cores']}, torch {device['torch']}; made by {results['command']}",
        "",
    ]
    for name, found in results["graphs"].items():
        lines += [
            f"## {name}",
            "",
            f"Unshared {found['unshared_bytes']:,} bytes ({_mib(found['unshared_bytes'])} MiB): ",
        ]
        lines[-1] += ", ".join(f"{part} {_mib(nbytes)}" for part, nbytes in found["parts"].items()) + " MiB."
        saved = savings(found)
        for what, (before, after) in PUBLISHED.items():
            lines += [
                "",
                f"Saving, {what}: {saved[what]:.1%}; memonger's own {before} -> {after}, {1 - after / before:.1%}.",
            ]
        lines += ["", "| shared | how | bytes | MiB | of unshared | planning s |", "|---|---|--:|--:|--:|--:|"]
        for what in PUBLISHED:
            for way, row in found[what]["ways"].items():
                lines.append(_row(what, way, row["shared_bytes"], found["unshared_bytes"], f"{row['seconds']:.3f}"))
            lines.append(
                _row(what, "proved bound, one order", found[what]["lower_bound_bytes"], found["unshared_bytes"], "")
            )
        laid_out = found["arena"]
        lines.append(
            _row("everything", "arena", laid_out["shared_bytes"], found["unshared_bytes"], f"{laid_out['seconds']:.3f}")
        )
        lines += [_row("everything", "lives at once", laid_out["max_live_bytes"], found["unshared_bytes"], ""), ""]
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
    graph = captured(batch=options.batch, size=options.size)
    results = {
        "device": to_json(this_device("cpu")),
        "command": f"`{shlex.join(['python', 'experiments/memonger/run.py', *sys.argv[1:]])}`",
        "batch": options.batch,
        "size": options.size,
        "ops": len(graph.ops),
        "graphs": {name: measure(graph, plan) for name, plan in plans(graph).items()},
        "larger": larger(options.batch, options.size),
        "segmentation": segmentation(SEGMENTED),
    }
    at_home = options.out / RESULT.name == HERE / RESULT
    if "measured" not in options.parts:
        if at_home:  # beside other work its planners take longer than they do
            seconds = [claim for claim in read(HERE) if claim.kind == "measured"]
            write(HERE, [*(claim for claim in claims_of(results) if claim.kind != "measured"), *seconds])
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "summary.md").write_text(summary(results))
    draw(results, options.out / "shared.png")
    if at_home:
        write(HERE, claims_of(results))
    print(summary(results))


if __name__ == "__main__":
    main()
