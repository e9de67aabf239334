"""The rules of nntrainer's memory planners, to compare with: offsets for buffers that live from one moment to before another."""

from collections.abc import Sequence

from autotune.layout import Buffers, lay_out

Lives = Sequence[tuple[int, int, int]]
"""Bytes, first moment, the one after the last."""
Layout = tuple[list[int], int]
"""Offsets, bytes in all."""


def ours(lives: Lives) -> Layout:
    nbytes, born, died = zip(*lives, strict=True) if lives else ((), (), ())
    found = lay_out(Buffers.from_lives(nbytes, born, died, alignment=1))
    return list(found.offsets), found.bytes


def basic(lives: Lives) -> Layout:
    """One beside the other."""
    offsets = [sum(nbytes for nbytes, _, _ in lives[:number]) for number in range(len(lives))]
    return offsets, sum(nbytes for nbytes, _, _ in lives)


def stacked(lives: Lives) -> Layout:
    """V1: what is over leaves the top of a stack; further down it is replaced by what has its very size, the latest first."""
    offsets = [0] * len(lives)
    stack: list[int] = []
    top = 0

    def end(number: int) -> int:
        return offsets[number] + lives[number][0]

    for number in sorted(range(len(lives)), key=lambda one: lives[one][1:]):
        nbytes, born, _ = lives[number]
        while stack and lives[stack[-1]][2] <= born:
            stack.pop()
        over = (at for at in reversed(range(len(stack))) if lives[stack[at]][2] <= born)
        found = next((at for at in over if lives[stack[at]][0] == nbytes), None)
        if found is None:
            offsets[number] = end(stack[-1]) if stack else 0
            stack.append(number)
        else:
            offsets[number] = offsets[stack[found]]
            stack[found] = number
        top = max(top, end(number))
    return offsets, top


def gradients_apart(lives: Lives, weight_gradients: Sequence[bool]) -> Layout:
    """V2: weights' gradients behind the others, the largest first; each joins the first whose life neither holds its own, nor
    is held by it, nor has its begin within. That the other's begin may lie within its own is not looked at.
    """
    others = [number for number, gradient in enumerate(weight_gradients) if not gradient]
    placed, top = stacked([lives[number] for number in others])
    offsets = dict(zip(others, placed, strict=True))
    slots: list[tuple[int, list[int]]] = []
    gradients = (number for number, gradient in enumerate(weight_gradients) if gradient)
    for number in sorted(gradients, key=lambda one: -lives[one][0]):
        slot = next((slot for slot in slots if not any(_seen(lives[number], lives[one]) for one in slot[1])), None)
        if slot is None:
            slot = (top, [])
            slots.append(slot)
            top += lives[number][0]
        slot[1].append(number)
        offsets[number] = slot[0]
    return [offsets[number] for number in range(len(lives))], top


def _seen(mine: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    (_, born, died), (_, start, stop) = mine, other
    held = (start < born and died < stop) or (born < start and stop < died)
    return held or start < born < stop < died or (born, died) == (start, stop)


def lowest_gap(lives: Lives) -> Layout:
    """V3: in order of birth, each into the lowest gap between those alive that holds it, else on top."""
    offsets = [0] * len(lives)
    alive: list[int] = []
    top = 0
    for number in sorted(range(len(lives)), key=lambda one: lives[one][1:]):
        nbytes, born, _ = lives[number]
        alive = sorted((one for one in alive if lives[one][2] > born), key=lambda one: offsets[one])
        at = 0
        for one in alive:
            if at + nbytes <= offsets[one]:
                break
            at = offsets[one] + lives[one][0]
        offsets[number] = at
        alive.append(number)
        top = max(top, at + nbytes)
    return offsets, top


def clashes(lives: Lives, layout: Layout) -> set[tuple[int, int]]:
    """Pairs that share a moment and a byte; a buffer that lies out of bounds clashes with itself.

    Moment after moment, what lives is looked at in the order of its offsets: apart from every planner.
    """
    offsets, top = layout
    found = {(one, one) for one, (nbytes, _, _) in enumerate(lives) if not 0 <= offsets[one] <= top - nbytes}
    for moment in {born for _, born, _ in lives}:
        alive = [one for one, (nbytes, born, died) in enumerate(lives) if born <= moment < died and nbytes]
        reached: list[int] = []
        for one in sorted(alive, key=lambda one: offsets[one]):
            found |= {
                tuple(sorted((one, other))) for other in reached if offsets[other] + lives[other][0] > offsets[one]
            }
            reached.append(one)
    return found
