"""Reach a device by an actor of Ray, which holds the device's custom resource and the harness.

Ray places the actor on a node that has the resource free, tells of nodes that die, and copies the user's code. Requests
and replies travel as JSON, not as pickles, so that another version of autotune is refused by name.
"""

import concurrent.futures
import contextlib
import importlib.util
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, DeviceRefusedError, install_command
from autotune.fleet.channel import Channel, FarEndLostError, Reach
from autotune.fleet.far_end.device_server import DeviceServer
from autotune.fleet.far_end.opener import find_opener
from autotune.fleet.messages import FleetCall, FleetReply, decode_reply, encode_message

POLL_SECONDS = 0.5
"""Time between two looks for a signal while a reply is awaited."""
NOTICE_SECONDS = 3.0
"""Time after which a device that is not free yet is reported."""
CLOSE_SECONDS = 1.5
"""Time in which an idle actor may end its children; then it is killed, and the kernel ends them."""
SUMMARY_CHARACTERS = 300
"""Number of last characters of an error of Ray that a message quotes."""
_EXCLUDED = ("/runs/", "/plans/")
"""Folders of the code that are not copied to the nodes, as patterns of a `.gitignore`: they grow with every study."""
_RAY_DEFAULTS = ("OMP_NUM_THREADS",)
"""Variables that Ray sets in a worker unless its node has them."""
_joined: list[tuple[str, str | None, str]] = []
"""The last connection of this module: address, code and the code's digest. Empty where the caller connected, or nobody."""


class DeviceActor:
    """The far end on a node of Ray: its methods run one after the other, on the worker's main thread."""

    def __init__(self, opener: str) -> None:
        remove_ray_defaults(Path(f"/proc/{os.getppid()}/environ"))
        self._server = DeviceServer(find_opener(opener))

    def answer(self, text: bytes) -> bytes:
        """Return the reply to a request."""
        return self._server.answer(text, _ignore)

    def close(self) -> None:
        """End the runner with all its processes."""
        self._server.close()


def remove_ray_defaults(parent_environ: Path) -> None:
    """Remove the variables that Ray set in this worker, and that its parent on the node does not have.

    Without this, every measurement would run on one thread.
    """
    try:
        names = {entry.partition(b"=")[0] for entry in parent_environ.read_bytes().split(b"\0")}
    except OSError:
        return
    for name in _RAY_DEFAULTS:
        if name.encode() not in names:
            os.environ.pop(name, None)


class ActorChannel:
    """Channel to an actor. Its waits notice signals, and the death of the actor or its node."""

    def __init__(self, reach: Reach) -> None:
        import ray

        self._ray, self._reach = ray, reach
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 1 if reach.uses_gpu else 0,
            "resources": {reach.resource: 1},
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 1,  # children die with the thread that started them
        }
        # untyped: Ray turns each method into an object with a method `remote`
        self._actor: Any = ray.remote(DeviceActor).options(**options).remote(reach.opener)
        self._begun, self._is_up = time.monotonic(), False
        self._is_idle = False
        """True if the actor is up and answers no request."""
        self._is_noticed = False
        """True if it was reported that the device is not free."""

    def ask(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
        from ray.exceptions import RayError, RayTaskError

        self._is_idle = False
        try:
            # a future: `ray.wait` runs the handlers of signals, and drops the exceptions that they raise
            reply: concurrent.futures.Future[bytes] = self._actor.answer.remote(encode_message(call)).future()
            while not concurrent.futures.wait([reply], timeout=POLL_SECONDS).done:
                if not self._is_up:
                    self._watch_queue(report)
            answer = reply.result()
            self._is_up = self._is_idle = True
            return decode_reply(answer)
        except RayError as error:
            # the far end returns its own exceptions as replies, so these come from importing or constructing the actor
            if isinstance(error, RayTaskError) or getattr(error, "actor_init_failed", False):
                raise DeviceRefusedError(
                    f"class {self._reach.device_class}: the far end cannot start ({_summarize(error)}); "
                    "install the same autotune on the node"
                ) from None
            # the actor, its node or the cluster is gone, or the code cannot be copied to the node
            raise FarEndLostError(f"{type(error).__name__}: {_summarize(error)}") from None

    def close(self) -> None:
        with contextlib.suppress(Exception):  # Ray raises what it likes for an actor or a cluster that is gone
            if self._is_idle:  # a busy actor would answer its request first
                self._ray.wait([self._actor.close.remote()], timeout=CLOSE_SECONDS)
            self._ray.kill(self._actor)

    def _watch_queue(self, report: Callable[[str], None]) -> None:
        """Report once that the device is waited for; FarEndLostError where no node of the cluster has one."""
        if time.monotonic() - self._begun < NOTICE_SECONDS:
            return
        resources: dict[str, float] = self._ray.cluster_resources()  # type: ignore[no-untyped-call]
        for name in (self._reach.resource, *(["GPU"] if self._reach.uses_gpu else [])):
            if not resources.get(name):
                raise FarEndLostError(f"no node of the cluster has the resource {name!r}")
        if not self._is_noticed:
            self._is_noticed = True
            report(f"waiting for a free device of class {self._reach.device_class}")


def connect(address: str, code: str | None = None, code_digest: str = "") -> None:
    """Connect this process to a cluster, unless it is connected; the code's directory is copied to all nodes.

    `code_digest` is that of the code, empty to accept any: nodes keep the copy of the first connection.

    Raises ConfigError where that directory does not exist, and DeviceRefusedError where Ray is not installed, where this
    process connected with other code or to another address, or where no cluster can be joined.
    """
    if code and not Path(code).is_dir():
        raise ConfigError(f"code {code}: no such directory; name that of the workloads as `code` of the fleet")
    if importlib.util.find_spec("ray") is None:
        raise DeviceRefusedError(f"engine ray: the package ray is not installed; {install_command('fleet')}")
    import ray

    if ray.is_initialized():
        joined = _joined[-1] if _joined else (address, code, code_digest)
        if joined[:2] != (address, code) or code_digest not in ("", joined[2]):
            # the nodes would measure the model as it was before
            address, code, _ = joined
            raise DeviceRefusedError(
                f"engine ray: this process joined the cluster at {address!r} with code {code or 'of the nodes'}, and address or "
                "code changed since then; run this study in a new Python process"
            )
        return
    _joined.clear()
    runtime_env = {"working_dir": code, "excludes": list(_EXCLUDED)} if code else None
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with _keep_signal_handlers():
        try:
            ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds, its own and Python's
            raise DeviceRefusedError(
                f"engine ray: cannot join a cluster at {address!r} ({_summarize(error)}); make the versions of Ray and Python "
                "equal, or start one with: ray start --head"
            ) from None
    _joined.append((address, code, code_digest))


@contextlib.contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore this process's signal handlers afterwards: Ray replaces that of SIGTERM, by which a study ends."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def open_channel(reach: Reach, report: Callable[[str], None]) -> Channel:  # noqa: ARG001 - as every engine
    """Ask Ray for a device of the class; DeviceRefusedError where no cluster answers."""
    connect(reach.address, reach.code, reach.code_digest)
    return ActorChannel(reach)


def _summarize(error: Exception) -> str:
    """Return the end of an error's text as one line: the cause comes last, after the frames of a far traceback."""
    return " ".join(str(error).split())[-SUMMARY_CHARACTERS:]


def _ignore(text: str) -> None:
    del text
