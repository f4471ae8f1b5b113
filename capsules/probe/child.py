"""The process in which the user's loader runs: request in the arguments, one JSON answer on standard output.

Whatever the loader prints goes to standard error, which whoever started this process keeps. At the time limit the
answer holds what was taken until then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ..errors import EvidenceError

Ended = Literal["limit", "exhausted", "time", "error"]


def main() -> None:
    """Answer one request and leave."""
    request = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answered = threading.Lock()

    def answer(content: dict[str, Any]) -> None:
        if not answered.acquire(blocking=False):
            return  # the watchdog was first
        from ..jsonio import encode

        answers.write(encode(content))
        answers.flush()
        sys.stdout.flush()
        os._exit(0)  # threads and workers of the loader are not waited for

    # After our own imports (torch) it is the loader's time.
    import_module(f"{__package__}.taking")
    answers.write(b"\n")
    answers.flush()
    try:
        answer(_probe(request, answer))
    except EvidenceError as error:
        answer({"refused": str(error)})
    except MemoryError:
        answer({"refused": "the loader ran out of memory; probe fewer batches with --batches"})
    except OSError as error:
        answer({"refused": f"{error.filename or request['capsule']}: {error.strerror or error}"})


def _probe(request: dict[str, Any], answer: Any) -> dict[str, Any]:
    from ..recorder.describe import tokenizer_digest, tokenizer_facts
    from ..writer import CapsuleWriter
    from . import taking
    from .loading import loader_of, resolve, said, take, tokenizer_in

    spec, directory = request["loader"], request["directory"]
    began = time.monotonic()
    loaders = {"train": loader_of(resolve(spec, directory), spec)}
    if request.get("validation"):
        loaders["validation"] = loader_of(resolve(request["validation"], directory), request["validation"])
    given = request.get("tokenizer")
    tokenizer = _made(resolve(given, directory)) if given else tokenizer_in(loaders["train"])
    facts = tokenizer_facts(tokenizer) if tokenizer is not None else {}
    adds = taking.adds_bos(tokenizer, facts.get("bos_id"))
    if adds is not None:
        facts["adds_bos"] = adds
    manifest: dict[str, Any] = {"run": {"name": spec, "command": request.get("command")}}
    if facts:
        manifest["tokenizer"] = facts
        name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        manifest["identity"] = {"tokenizer": {"name": name, "sha256": tokenizer_digest(tokenizer)}}
    manifest["trigger"] = {"kind": "manual", "message": f"probe of {spec}"}
    path = Path(request["capsule"])
    with CapsuleWriter(path, title=f"what {spec} yields", phase="training", manifest=manifest) as writer:
        taker = taking.Taker(writer, taking.text_of(tokenizer), facts.get("pad_id"))
        problem: str | None = None
        exhausted = dict.fromkeys(loaders, False)
        ended: Ended = "time"  # until every loader was taken from

        def finish() -> dict[str, Any]:
            writer.records(
                "events",
                [
                    {
                        "kind": "loader_read",
                        "split": split,
                        "batches": taker.taken[split],
                        "exhausted": exhausted[split],
                    }
                    for split in loaders
                ],
            )
            writer.close()
            return {
                **taker.summary(),
                "tokenizer": str(manifest["identity"]["tokenizer"]["name"]) if facts else None,
                "ended": ended,
                "exhausted": exhausted,
                "problem": problem,
                "seconds": time.monotonic() - began,
            }

        def watch() -> None:
            with taker.lock:
                answer(finish())

        watchdog = threading.Timer(max(0.1, request["timeout"] - (time.monotonic() - began)), watch)
        watchdog.daemon = True
        watchdog.start()
        left: dict[str, Iterator[Any]] = {}
        split = ""
        try:
            for split, loader in loaders.items():
                left[split] = iter(loader)
                for batch in take(left[split], request["batches"]):
                    taker.add(batch, split)
                exhausted[split] = taker.taken[split] < request["batches"]
            # Whether that was all tells one batch more. It comes last: it may be long in coming, and costs no evidence.
            ended = "limit"
            for split, batches in left.items():
                exhausted[split] = exhausted[split] or not any(True for _ in take(batches, 1))
            ended = "exhausted" if all(exhausted.values()) else "limit"
        except EvidenceError:
            raise
        except (Exception, SystemExit) as error:
            problem = said(f"batch {taker.taken[split]} of {split}", error)
            ended = "error"
        watchdog.cancel()
        with taker.lock:
            return finish()


def _made(tokenizer: Any) -> Any:
    """A tokenizer; a function that makes one is called."""
    return tokenizer if hasattr(tokenizer, "decode") or not callable(tokenizer) else tokenizer()


if __name__ == "__main__":
    main()
