"""Ray: imported where it is installed, connected to, or started on this machine."""

import logging
import os
import re
import secrets
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from webgemma.errors import InputError, WebgemmaError
from webgemma.values import shown

NEEDS_RAY = 'This needs Ray: run `pip install "webgemma[ray]"`.'
ADDRESS_VARIABLE = "RAY_ADDRESS"
MAX_REPLICAS = 1024
START_SECONDS = 120.0  # that Ray's processes have to find each other; Ray would wait 30

# Ray would report its use to its makers, and write into the terminal.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
# Other users of this machine must not use a Ray that is started here, since it runs any code. By
# itself Ray would write a token into the home folder.
AUTH_MODE = "RAY_AUTH_MODE"  # Ray sets it
ALONE = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}

_OWN_ERROR = re.compile(rf"\b{WebgemmaError.__module__}\.\w+: (.+)")

_locks: list[int] = []  # descriptors of this process, which frees them when it ends


def import_ray(name: str = "ray") -> Any:
    """Return Ray or one of its modules; InputError, which says what to install, without it."""
    try:
        return import_module(name)
    except ImportError as error:  # its extras raise their own, without a name
        outside = (error.name or "ray").partition(".")[0]
        if outside == "webgemma":
            raise
        raise InputError(NEEDS_RAY) from None


def count_replicas(replicas: int | None, gpus: Sequence[str]) -> int:
    """Return how many copies of the model are wanted: by default one for each GPU that is named."""
    if isinstance(gpus, str):
        raise InputError(f"gpus is {shown(gpus)}; it must be a list of names.")
    if replicas is None:
        return max(1, len(gpus))
    if not 1 <= replicas <= MAX_REPLICAS:
        raise InputError(
            f"replicas is {shown(replicas)}; it must be a whole number from 1 to {MAX_REPLICAS}."
        )
    if replicas < len(gpus):
        raise InputError(
            f"{len(gpus)} GPUs are named, but replicas is {replicas}: each GPU needs one at least."
        )
    return replicas


@contextmanager
def connected(replicas: int) -> Iterator[Any]:
    """Give Ray: as this process uses it already, that of RAY_ADDRESS, or one on this machine alone.

    What is connected or started here ends with the block."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get(ADDRESS_VARIABLE)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    own = QUIET if address else QUIET | ALONE
    missing = {name: value for name, value in own.items() if name not in os.environ}
    restored = [name for name in (*own, AUTH_MODE) if name not in os.environ]
    os.environ.update(missing)
    try:
        # Ray would print what befalls its processes to standard output.
        with _changed("ray._private.worker", "_worker_logs_enabled", False):
            try:
                with _without_stderr(), _same_signals():
                    if address:
                        ray.init(address=address, **options)
                    else:
                        _start(ray, replicas, options)
            except KeyboardInterrupt:
                ray.shutdown()  # what has been started by now
                raise
            except Exception as error:  # some of Ray's are of no type of their own
                ray.shutdown()
                where = f"at {address} ({ADDRESS_VARIABLE})" if address else "on this machine"
                raise InputError(f"Ray {where} does not start: {_first_line(error)}") from None
            try:
                yield ray
            finally:
                ray.shutdown()
    finally:
        for name in restored:
            os.environ.pop(name, None)


def _start(ray: Any, replicas: int, options: Mapping[str, Any]) -> None:
    """Start Ray on this machine, out of reach of others."""
    services, node = (import_module(f"ray._private.{name}") for name in ("services", "node"))
    with (
        _changed("ray._private.ray_constants", "ENABLE_RAY_CLUSTER", False),
        _changed(services.__name__, "get_node", _with_retries(getattr(services, "get_node", None))),
        _changed(node.__name__, "Node", _ended_on_failure(getattr(node, "Node", object))),
    ):
        ray.init(
            address="local",
            # Copies of a model on one GPU need no core each.
            num_cpus=max(os.cpu_count() or 1, replicas + 1),
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            **options,
        )


def _with_retries(get_node: Any) -> Any:
    """Return a function that waits for a node of Ray as long as a busy machine may need."""

    def get(*args: Any, **named: Any) -> Any:
        end = monotonic() + START_SECONDS
        while True:
            try:
                return get_node(*args, **named)
            except RuntimeError:  # it is not there yet
                if monotonic() >= end:
                    raise
                sleep(0.2)

    return get


def _ended_on_failure(node: Any) -> Any:
    """Return a kind of Ray's node that ends its processes if it cannot be started."""

    def start(self: Any, *args: Any, **named: Any) -> None:
        try:
            node.__init__(self, *args, **named)
        except BaseException:
            with suppress(Exception):
                self.kill_all_processes(check_alive=False, wait=True)
            raise

    return type(node.__name__, (node,), {"__init__": start})


def check_resources(ray: Any, replicas: int, num_gpus: float) -> None:
    """Raise InputError where Ray would wait for machines that it does not have."""
    available = ray.cluster_resources()
    for name, kind, each in (("CPU", "cores", 1), ("GPU", "GPUs", num_gpus)):
        if replicas * each > available.get(name, 0):
            raise InputError(
                f"Ray knows of {available.get(name, 0):g} {kind}, but {replicas} "
                f"process{'es' * (replicas > 1)} of {each:g} each are requested: request fewer."
            )


@contextmanager
def _changed(module: str, name: str, value: Any) -> Iterator[None]:
    """Change what Ray has no option for, if this version of it has such a name."""
    found = import_module(module)
    if not hasattr(found, name):
        yield
        return
    before = getattr(found, name)
    setattr(found, name, value)
    try:
        yield
    finally:
        setattr(found, name, before)


@contextmanager
def _same_signals() -> Iterator[None]:
    """Answer SIGTERM as before: Ray replaces what does, and leaves when one comes meanwhile."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        with suppress(ValueError, TypeError):  # not in the main thread; not set by Python
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Send what native code writes to standard error nowhere; errors are raised all the same."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Ray's account of its work out of the terminal; its own files have it."""
    loggers = [logging.getLogger(name) for name in ("ray", "ray.data", "ray.serve")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def cause_of(error: BaseException) -> str:
    """Return what a failure in one of Ray's processes says: our own sentence, if there is one.

    Ray gives the error of another process as text, with its traceback."""
    text, at = str(error), error.__cause__ or error.__context__
    while at is not None:
        text, at = f"{text}\n{at}", at.__cause__
    if found := _OWN_ERROR.findall(text):
        return str(found[-1])
    return f"Ray reports: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def take_gpu(gpus: Sequence[str], job: str) -> str | None:
    """Return the GPU for this process: the first of the list that no other one of the job has here.

    A process that ends in any way frees its GPU. When all are taken, they are shared in turn."""
    if len(set(gpus)) <= 1:
        return gpus[0] if gpus else None
    try:
        import fcntl
    except ImportError:  # Windows
        raise InputError("A list of GPUs needs Linux or macOS; name one of them.") from None
    for slot in range(MAX_REPLICAS):
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(_lock_path(job, slot), flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        _locks.append(descriptor)
        return gpus[slot % len(gpus)]
    raise InputError(f"There are more than {MAX_REPLICAS} processes on this machine.")


def remove_locks(job: str) -> None:
    """Remove the files by which the processes of a job on this machine shared its GPUs."""
    for slot in range(MAX_REPLICAS):
        try:
            _lock_path(job, slot).unlink()
        except FileNotFoundError:
            return
        except OSError:
            continue


def _lock_path(job: str, slot: int) -> Path:
    return Path(tempfile.gettempdir()) / f"webgemma-{job}-{slot}.lock"


def enter_folder(path: str) -> None:
    """Read relative paths as the process that began the job does, where its folder exists."""
    with suppress(OSError):
        os.chdir(path)
