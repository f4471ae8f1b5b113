"""Starts scripts in processes of their own without importing torch for each: it is imported once, and then forked.

Reads one JSON line a request: {"start": script, "argv", "out", "err"} → pid, {"wait": pid} → exit status as a shell's
caller sees it (negative: the signal).
"""

import json
import os
import runpy
import sys

import torch
import torch._dynamo  # the first optimizer would import it, for a second or more
import torch.distributed.fsdp  # noqa: F401
from llmconsole.capsules import Recorder  # noqa: F401


def child(request: dict) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = [request["start"], *request["argv"]]
    runpy.run_path(request["start"], run_name="__main__")


def main() -> None:
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                sys.stdin.close()
                return child(request)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
