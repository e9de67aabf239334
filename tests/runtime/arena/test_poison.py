"""A build of the arena in which free memory may not be touched: what the arena's own tests do is clean in it, and what
touches a freed place is told.
"""

import functools
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.runtime.arena.test_arena import LOADING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the arena is compiled with g++"),
]

PATTERN, ASAN = ("-O1", "-g", "-DAUTOTUNE_POISON"), ("-fsanitize=address", "-fno-omit-frame-pointer")

SCENARIOS = (
    "a_replayed_step_has_no_misses_and_mallocs_bits",
    "another_batch_shape_gives_mallocs_bits",
    "an_exception_in_the_middle_of_a_step_leaves_the_next_one_right",
    "a_gradient_hook_that_raises_leaves_the_next_step_right",
    "an_evaluation_between_steps_changes_nothing",
    "a_step_inside_another_steps_hook_leaves_both_right",
    "two_steps_in_one_process_keep_apart",
    "two_models_that_train_at_once_on_two_threads_have_mallocs_bits",
    "a_thread_that_allocates_beside_the_step_stays_outside",
    "a_tensor_may_be_dropped_by_another_thread",
    "a_tensor_kept_from_a_step_keeps_its_content_through_the_next",
    "a_tensor_that_outlives_its_arena_keeps_its_content",
    "one_allocation_of_another_size_is_one_miss_and_the_layout_stays",
)
"""Of `test_arena`."""

MODELS = """
    from dataclasses import replace
    import torch
    from autotune.ir.plan import Plan
    from autotune.runtime.train_step import TrainStep
    from autotune.workloads.zoo import ZOO
    from tests.support.eager import eager_step
    from tests.workloads.zoo.tiny import TINY

    traced = Plan.traced  # a step without a plan runs it, so that each model is captured once
    Plan.traced = lambda graph: replace(traced(graph), allocator="arena")

    for name in ("mobilenet_v2", "gpt2", "lstm"):
        one, other = (ZOO[name](**TINY[name]) for _ in range(2))
        planned = TrainStep(other.model, other.loss_fn, other.optimizer, other.batch)
        for number in range(4):
            losses = []
            for step in (lambda: eager_step(one)[0], lambda: planned(other.batch)):
                torch.manual_seed(number)
                losses.append(step())
            assert losses[0].equal(losses[1]), name
        assert planned._selector.last.arena.bytes > 0
        assert planned._selector.last.arena.misses == 0
        assert all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values())), name
    print("same")
"""

FAULTS = """
    import ctypes, torch
    from autotune.runtime.arena import StepArena
    arena = StepArena()
    for number in range(3):  # recorded, recorded, replayed
        with arena.step():
            wide = torch.ones(2**16)
            narrow = torch.ones(1250)
            at, inside = wide.data_ptr(), ctypes.string_at(wide.data_ptr(), 4 * 2**16)
            assert inside == ctypes.string_at(at, len(inside))
            end = narrow.data_ptr() + 5000
            del wide
            FAULT
            del narrow
    print("no one noticed")
"""
TOUCHED = "torch.frombuffer((ctypes.c_float * 2**16).from_address(at), dtype=torch.float32)"


@functools.cache
def preloaded() -> str:
    """What a process under AddressSanitizer is started with; empty where there is none."""
    if shutil.which("g++") is None:
        return ""
    # libasan looks for C++'s exceptions when it starts, before torch brings them
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    return " ".join(libraries) if all(Path(path).is_absolute() for path in libraries) else ""


def run(script: str, *, asan: bool) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, whose arena is poisoned."""
    environment = dict(os.environ)
    if asan:
        if not preloaded():
            pytest.skip("g++ has no libasan.so")
        options = "detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1"
        environment |= {"LD_PRELOAD": preloaded(), "ASAN_OPTIONS": options}
    begin = f"""
        import os
        os.environ.pop("LD_PRELOAD", None)  # the compiler needs none of it
        from autotune.runtime.arena import build
        build.FLAGS = {PATTERN + (ASAN if asan else ())}
        assert build.library() is not None
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(script)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


BUILDS = pytest.mark.parametrize("asan", [False, True], ids=["pattern", "asan"])


@BUILDS
def test_what_the_arenas_tests_do_touches_nothing_that_is_free(asan: bool) -> None:
    done = run(
        f"""
        from tests.runtime.arena import test_arena, test_heap
        for name in {SCENARIOS}:
            getattr(test_arena, "test_" + name)()
        test_heap.test_tensors_lie_apart_aligned_and_keep_their_content()
        print("clean")
        """,
        asan=asan,
    )
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-4000:]


@BUILDS
def test_a_data_loader_with_workers_touches_nothing_that_is_free(asan: bool) -> None:
    # libasan of g++ 12 may hold a lock of its own while a process forks, so beside a thread that allocates it hangs
    done = run(LOADING.replace("while not stop.is_set()", "while False") if asan else LOADING, asan=asan)
    assert (done.returncode, done.stdout) == (0, "{8000.0} 0 True\n"), done.stderr[-4000:]


@BUILDS
def test_whole_models_touch_nothing_that_is_free(asan: bool) -> None:
    done = run(MODELS, asan=asan)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr[-4000:]


FAULT_AT = {
    "read": "ctypes.string_at(at, 64)",
    "read inside": "ctypes.string_at(at + 2**17, 8)",
    "write": "ctypes.memset(at, 0, 64)",
    "read behind an end": "ctypes.string_at(end, 8)",
}


@pytest.mark.parametrize(
    ("step", "fault"),
    [("recorded", "write"), ("replayed", "read"), ("recorded", "read inside"), ("replayed", "read behind an end")],
)
def test_touching_what_is_free_is_told_by_the_sanitizer(step: str, fault: str) -> None:
    when = f"if number == {('recorded', 'replayed').index(step) * 2}: {FAULT_AT[fault]}"
    done = run(FAULTS.replace("FAULT", when), asan=True)
    assert done.returncode != 0
    assert "no one noticed" not in done.stdout
    assert "AddressSanitizer: use-after-poison" in done.stderr


@pytest.mark.parametrize("first", [0, 2], ids=["recorded", "replayed"])
def test_what_torchs_own_kernels_write_to_a_freed_place_is_told_when_it_is_handed_out_again(first: int) -> None:
    when = f"if number == {first}: {TOUCHED}.fill_(1.0)"
    done = run(FAULTS.replace("FAULT", when).replace("range(3)", "range(4)"), asan=False)
    assert done.returncode == -6
    assert "arena: written after it was freed at" in done.stderr


def test_what_torchs_own_kernels_read_from_a_freed_place_is_no_number() -> None:
    done = run(FAULTS.replace("FAULT", f"print(bool({TOUCHED}.isnan().all()))"), asan=False)
    assert (done.returncode, done.stdout) == (0, "True\n" * 3 + "no one noticed\n"), done.stderr
