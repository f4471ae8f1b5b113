"""The worker process: reads requests from its input, opens capsules and runs the rules, writes one answer a line.

Everything that touches a capsule or imports torch happens here, under a limit of the address space.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import sys
import threading
from typing import Any

#: What the loader of shared libraries says where an allocation would raise MemoryError.
_NO_MEMORY = ("failed to map segment", "annot allocate memory", "cannot create shared object")


def main() -> None:
    """Serve until the input ends."""
    # The answers get a descriptor of their own; whatever code here prints, even from C, goes to standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(5)  # the node's training job comes first
    _limit_memory(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        request = json.loads(requests.get())
        answer = {"id": request["id"], **_answer(request["method"], request["params"])}
        try:
            line = json.dumps(answer).encode()
        except MemoryError:
            line = json.dumps({"id": request["id"], "error": _out_of_memory(request["method"])}).encode()
        answers.write(line + b"\n")
        answers.flush()


def _read(requests: queue.SimpleQueue[bytes]) -> None:
    """Pass requests on; when the input ends, so does the process, in the middle of a call too."""
    pending = b""
    try:
        # Unbuffered: a lock of sys.stdin held by this thread would abort the interpreter when it ends.
        while chunk := os.read(0, 1 << 20):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                requests.put(line)
        if scratch := os.environ.get("LLMCONSOLE_SCRATCH"):  # whoever asked may have died without removing it
            shutil.rmtree(scratch, ignore_errors=True)
    finally:  # whatever happens in here, a worker that nobody hears must not work on
        os._exit(0)


def _limit_memory(size: int) -> None:
    if size <= 0:
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    from ..capsules.errors import EvidenceError
    from ..capsules.jsonio import plain
    from .answers import METHODS
    from .casebook.incident import IncidentError

    try:
        function = METHODS.get(method)
        if function is None:
            from .imports import belong_together
            from .looks import find

            function = find(method)
            jobs = params.pop("jobs", {})  # looks know a job of raw files by its first one
            for each in (params.get("path"), params.get("beside")):
                if each:
                    belong_together(each, jobs.get(each, ()))
        if function is None:
            return {"error": {"kind": "failed", "message": f"the worker knows no method {method}"}}
        return {"result": plain(function(**params))}
    except (EvidenceError, IncidentError) as error:
        return {"error": {"kind": "refused", "message": str(error)}}
    except MemoryError:
        return {"error": _out_of_memory(method)}
    except RecursionError:
        return {"error": {"kind": "refused", "message": f"{method}: the input is nested too deeply to be read"}}
    except Exception as error:
        if isinstance(error, OSError | ImportError) and any(words in str(error) for words in _NO_MEMORY):
            return {"error": _out_of_memory(method)}
        import traceback

        traceback.print_exc()
        return {"error": {"kind": "failed", "message": f"{method}: {type(error).__name__}: {error}"}}


def _out_of_memory(method: str) -> dict[str, str]:
    return {
        "kind": "crashed",
        "message": f"{method}: the analysis process reached its memory limit; LLMCONSOLE_WORKER_MEMORY (GiB) raises it",
    }


if __name__ == "__main__":
    main()
