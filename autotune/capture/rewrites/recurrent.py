"""Group the ops of a recurrent layer into one region each for forward and backward: GRU, RNN, cells, and some LSTM.

Eager runs thousands of small kernels for such a layer, many in place on parts of a tensor. The trace has functional ops,
whose results have other strides, so some kernels round differently. Inside of a region the ops run as in eager. An LSTM that
oneDNN runs needs no region.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.fx import traceback

from autotune.capture.eager_kernels import in_place_overload
from autotune.capture.rewrites import dropout, lstm

CALLS = frozenset(["gru", "rnn_tanh", "rnn_relu", "lstm", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm_cell"])
REGION = "region"
"""Key in a node's meta: the name of the region that it belongs to."""
_CALL = "autotune_recurrent"
"""Key among a node's annotations: the recurrent call that the node belongs to."""


def mark_calls(module: fx.GraphModule) -> None:
    """Annotate the recurrent calls of a captured forward, so that their traced ops can be identified."""
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name in CALLS:
            node.meta["custom"] = {**node.meta.get("custom", {}), _CALL: f"{node.name} {name}"}


@contextmanager
def annotate_call(function: Any) -> Iterator[None]:
    """Annotate the ops of a recurrent call that runs in the block; do nothing for other functions."""
    name = getattr(function, "__name__", "")
    if name not in CALLS:
        yield
        return
    with traceback.annotate({_CALL: f"{name}_{next(_NUMBERS)} {name}"}):
        yield


_NUMBERS = itertools.count()


def mark_regions(graph: fx.Graph) -> None:
    """Put the ops of each recurrent call into regions: one per layer for the forward, one for the backward."""
    whole = {_call(node) for node in graph.nodes if node.target is lstm.LAYER}
    layer_of: dict[fx.Node, int] = {}
    of_sequence: dict[tuple[str, int], int] = {}
    tagged: dict[tuple[str, int, bool], set[fx.Node]] = defaultdict(set)
    for node in graph.nodes:
        if node.op == "placeholder":
            match = re.search(r"_l(\d+)(_reverse)?$", str(getattr(node.meta.get("desc"), "target", "")))
            layer_of[node] = int(match[1]) if match else 0
        call = _call(node)
        if call is None or call in whole or node.target in (dropout.draw_mask, dropout.keep):
            continue
        backward = node.meta.get("partitioner_tag") == "is_backward"
        if backward:
            layer = of_sequence.get((call, node.meta.get("seq_nr", -1)), 0)
        else:
            inside = [source for source in node.all_input_nodes if source.op == "placeholder" or _call(source) == call]
            layer = max((layer_of.get(source, 0) for source in inside), default=0)
            layer_of[node] = layer
            of_sequence.setdefault((call, node.meta.get("seq_nr", -1)), layer)
        tagged[call, layer, backward].add(node)
    ordered = list(graph.nodes)
    position = {node: index for index, node in enumerate(ordered)}
    sums = [node for node in ordered if node.meta.get("is_gradient_acc")]
    for (call, layer, backward), nodes in tagged.items():
        first, last = min(position[node] for node in nodes), max(position[node] for node in nodes)
        region = _close(nodes, ordered[first : last + 1], sums)
        if any(REGION in node.meta or node.target is dropout.draw_mask for node in region):
            continue  # interleaved with another call: its ops stay single
        name = f"{call.partition(' ')[0]}.{layer} {call.partition(' ')[2]}_{'backward' if backward else 'forward'}"
        for node in region:
            node.meta[REGION] = name


def has_regions(graph: fx.Graph) -> bool:
    """Return whether ops of a recurrent layer are in a region."""
    return any(REGION in node.meta for node in graph.nodes)


def inplace_kernel(node: fx.Node) -> Any:
    """Return the in-place overload of a region's op if it overwrites nothing that is read later; else None."""
    overload = in_place_overload(node)
    if overload is None or not isinstance(source := node.args[0], fx.Node):
        return None
    before, after = source.meta["val"], node.meta["val"]
    if (before.shape, before.dtype, before.device) != (after.shape, after.dtype, after.device):
        return None
    root = _root(source)
    if root.op != "call_function" or root.meta.get(REGION) != node.meta[REGION]:
        return None
    return None if _read_later(root, node, source) else overload


def _call(node: fx.Node) -> str | None:
    call: str | None = node.meta.get("custom", {}).get(_CALL)
    return call


def _close(nodes: set[fx.Node], span: list[fx.Node], sums: list[fx.Node]) -> set[fx.Node]:
    """Add the nodes on paths between two of the nodes, and sums of their gradients.

    `span` has the graph's nodes from the first of the nodes to the last. `sums` has all sums of gradients. Both are in order.
    """
    below: set[fx.Node] = set()
    for node in span:
        if node in nodes or any(source in below for source in node.all_input_nodes):
            below.add(node)
    above: set[fx.Node] = set()
    for node in reversed(span):
        if node in nodes or any(user in above for user in node.users):
            above.add(node)
    closed = below & above
    for node in sums:
        if node not in closed and closed.issuperset(node.all_input_nodes):
            closed.add(node)
    return closed


def _root(node: fx.Node) -> fx.Node:
    """Return the node that allocated the memory of a node's tensor."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Return whether a node is a view of its first input."""
    result: Any = node.meta.get("val")
    result = result[0] if isinstance(result, (list, tuple)) and result else result
    if node.op != "call_function" or not node.all_input_nodes or not hasattr(result, "untyped_storage"):
        return False
    source: Any = node.all_input_nodes[0].meta.get("val")
    source = source[0] if isinstance(source, (list, tuple)) and source else source
    return hasattr(source, "untyped_storage") and bool(
        result.untyped_storage()._cdata == source.untyped_storage()._cdata
    )


def _read_later(root: fx.Node, writer: fx.Node, written: fx.Node) -> bool:
    """Return whether a node after the writer reads memory that it overwrites, other than through the writer."""
    chain = [written]
    while chain[-1] is not root:
        chain.append(chain[-1].all_input_nodes[0])
    later = False
    stack = [root]
    while stack and not later:
        node = stack.pop()
        for user in node.users:
            if is_view(user) and _root(user) is root:
                is_disjoint = user not in chain and any(_are_disjoint_parts(user, link) for link in chain)
                if not is_disjoint:
                    stack.append(user)
            elif user is not writer and not user < writer:
                later = True
    return later


def _are_disjoint_parts(part: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes are different parts of one split tensor."""
    if part is other or part.target is not other.target or getattr(part.target, "__name__", "") != "getitem":
        return False
    return part.args[0] is other.args[0] and part.args[1] != other.args[1]
