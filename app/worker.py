"""A warm, killable process that reads capsules and analyses them; whatever happens there, this side goes on.

One JSON object a line each way: ``{id, method, params}`` in, ``{id, result}`` or ``{id, error: {kind, message}}`` out.
Under a terminal UI fork writes on the screen and spawn cannot pass its descriptors, so it is a plain subprocess in a
session of its own with all three streams piped; it ends when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any, Literal, Self

Kind = Literal["refused", "crashed", "timeout", "failed"]

#: Address space of the worker. Importing torch maps some 10 GiB on a CUDA build, so less than this breaks honest work.
DEFAULT_MEMORY_GIB = 32.0
DEFAULT_TIMEOUT_S = 600.0
_LARGEST_ANSWER = 1 << 30
_LARGEST_SETTING = 1e9


class WorkerError(Exception):
    """A call that brought no result; the message is one line that says what, where, and what to do.

    Attributes:
        kind: ``refused`` (the input is unusable), ``failed`` (an error inside the worker), ``crashed`` (the process
            died or ran out of memory) or ``timeout`` (it was killed). After the last two the next call starts afresh.
    """

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind


class Worker:
    """Calls methods of :mod:`.worker_main` in a subprocess that is started on first use and restarted when it died.

    Args:
        memory_gib: limit of the worker's address space; 0 means none; default ``LLMCONSOLE_WORKER_MEMORY`` or 32.
        timeout: seconds a call may take unless it says otherwise; default ``LLMCONSOLE_WORKER_TIMEOUT`` or 600.
    """

    def __init__(self, memory_gib: float | None = None, timeout: float | None = None) -> None:
        self.memory_gib = _setting("LLMCONSOLE_WORKER_MEMORY", DEFAULT_MEMORY_GIB) if memory_gib is None else memory_gib
        self.timeout = _setting("LLMCONSOLE_WORKER_TIMEOUT", DEFAULT_TIMEOUT_S) if timeout is None else timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: deque[str] = deque(maxlen=50)
        self._drain: threading.Thread | None = None
        self._scratch = ""
        self._lock = threading.Lock()
        self._calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the live worker, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def complaints(self) -> tuple[str, ...]:
        """The last lines that code in the worker printed, to either of its streams."""
        return tuple(self._complaints)

    def start(self) -> None:
        """Start the process now, so that the first call need not wait for it."""
        if self.pid is not None:
            return
        self.close()
        environment = dict(os.environ)
        # Thread pools reserve address space for every core of a large node and win nothing here.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment.setdefault(name, "4")
        environment.setdefault("MALLOC_ARENA_MAX", "4")
        from .scratch import SCRATCH, new_scratch

        with contextlib.suppress(OSError):  # without one, only raw files cannot be read
            environment[SCRATCH] = self._scratch = new_scratch()
        self._complaints.clear()
        self._process = subprocess.Popen(
            # -P: a directory of evidence may hold a numpy.py, and -m would import it from there.
            [sys.executable, "-P", "-m", "llmconsole.app.worker_main", str(int(self.memory_gib * 2**30))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        self._drain = threading.Thread(target=_collect, args=(self._process, self._complaints), daemon=True)
        self._drain.start()

    def call(self, method: str, params: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Call one method and return its result as plain data (non-finite floats are floats).

        Raises:
            WorkerError: no result; see its ``kind``.
        """
        limit = self.timeout if timeout is None else timeout
        with self._lock:
            self.start()
            process = self._process
            assert process is not None
            self._calls += 1
            request = json.dumps({"id": self._calls, "method": method, "params": params or {}}).encode() + b"\n"
            try:
                answer = self._exchange(process, request, time.monotonic() + limit)
            except TimeoutError:
                self._kill()
                raise WorkerError("timeout", f"{method} took longer than {limit:g} s and was stopped") from None
            except BaseException:  # an interrupt in the middle: the next answer would be read as another call's
                self._kill()
                raise
            if answer is None:
                raise WorkerError("crashed", f"{method}: the analysis process {self._cause_of_death()}")
        error = answer.get("error")
        if error is None:
            return answer.get("result")
        if error["kind"] == "crashed":  # out of memory: what is left of the process cannot be trusted
            self._kill()
        raise WorkerError(error["kind"], error["message"])

    def abort(self) -> None:
        """Kill the process from another thread; a call in progress ends as ``crashed``."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process; it is gone when this returns."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        self._kill()

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, deadline: float) -> dict[str, Any] | None:
        """Send one request and wait for its answer; None where the process died."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except OSError:
            return None
        buffer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not buffer.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                chunk = os.read(process.stdout.fileno(), 1 << 20)
                if not chunk:
                    return None
                buffer += chunk
                if len(buffer) > _LARGEST_ANSWER:
                    return None
        return json.loads(buffer)

    def _cause_of_death(self) -> str:
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        status = process.poll()
        self._kill()
        if status is None:
            return "sent more than it may and was stopped"
        if status < 0:
            name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
            hint = " (out of memory, most likely)" if name == "SIGKILL" else ""
            return f"was ended by {name}{hint}"
        last = f": {self._complaints[-1]}" if self._complaints else ""
        return f"left with status {status}{last}"

    def _kill(self) -> None:
        """Kill the worker's whole session and reap it."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._drain is not None:
            self._drain.join(1.0)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self._scratch:
            import shutil

            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""


def _collect(process: subprocess.Popen[bytes], lines: deque[str]) -> None:
    """Keep the worker's standard error empty, or it would block on a full pipe."""
    assert process.stderr is not None
    with contextlib.suppress(OSError, ValueError):
        while line := process.stderr.readline(1 << 16):
            lines.append(line.decode("utf-8", "replace").rstrip())


def _setting(name: str, default: float) -> float:
    try:
        given = float(os.environ.get(name) or default)
    except ValueError:
        return default
    return given if 0 <= given < _LARGEST_SETTING else default
