"""The worker may die in any way; the caller gets one line, the next call works, and no process stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from llmconsole.app.worker import Worker, WorkerError


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def kill_when_busy(worker: Worker, number: int) -> threading.Thread:
    """Send a signal to the worker as soon as it is in the middle of a call."""

    def kill() -> None:
        while worker.pid is None:
            time.sleep(0.005)
        os.kill(worker.pid, signal.SIGSTOP)  # it cannot answer any more, whatever it has read
        os.kill(worker.pid, number)
        os.kill(worker.pid, signal.SIGCONT)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_a_worker_killed_in_a_call_becomes_one_line_and_the_next_call_works(number: signal.Signals):
    with Worker(timeout=60) as worker:
        killer = kill_when_busy(worker, number)
        with pytest.raises(
            WorkerError, match=f"device_facts: the analysis process was ended by {number.name}"
        ) as caught:
            worker.call("device_facts")
        killer.join()
        assert caught.value.kind == "crashed"
        assert worker.call("ping")["pid"] == worker.pid


def test_a_worker_that_died_between_calls_is_started_afresh():
    with Worker(timeout=60) as worker:
        first = worker.call("ping")["pid"]
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert worker.call("ping")["pid"] != first


def test_a_call_that_takes_too_long_is_stopped_and_its_process_gone():
    with Worker() as worker:
        pid = worker.call("ping")["pid"]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"ping took longer than 0\.2 s") as caught:
            worker.call("ping", timeout=0.2)
        assert caught.value.kind == "timeout"
        assert is_gone(pid)
        assert worker.call("ping", timeout=60)["pid"] != pid


def test_the_memory_limit_ends_the_call_and_not_the_caller():
    with Worker(memory_gib=0.4, timeout=60) as worker:
        assert worker.call("ping")
        with pytest.raises(WorkerError) as caught:
            worker.call("device_facts")  # torch alone maps more than that
        assert caught.value.kind == "crashed"
        assert "reached its memory limit; LLMCONSOLE_WORKER_MEMORY" in str(caught.value)
        assert worker.call("ping")


def test_the_default_limit_leaves_room_for_torch():
    with Worker(timeout=100) as worker:
        assert worker.call("device_facts")["torch"]


def test_an_unknown_method_is_an_error_of_the_call_alone():
    with Worker(timeout=60) as worker:
        with pytest.raises(WorkerError) as caught:
            worker.call("no_such_method")
        assert caught.value.kind == "failed"
        assert worker.call("ping")


def test_what_is_printed_in_the_worker_does_not_mix_with_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nprint('stray')\nos.write(1, b'early\\n')\n")
    script = "from llmconsole.app import answers, worker_main\nimport os\n"
    script += "answers.METHODS['noisy'] = lambda: (print('{\"id\": 1}'), os.write(1, b'from C'), 'quiet')[-1]\n"
    script += "worker_main.main()\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=b'{"id": 7, "method": "noisy", "params": {}}\n{"id": 8, "method": "noisy", "params": {}}\n',
        capture_output=True,
        timeout=60,
    )
    assert done.stdout in (
        b"",
        b'{"id": 7, "result": "quiet"}\n',
        b'{"id": 7, "result": "quiet"}\n{"id": 8, "result": "quiet"}\n',
    )


def test_the_worker_ends_with_its_input_even_in_the_middle_of_a_call():
    process = subprocess.Popen(
        [sys.executable, "-c", "import time\nfrom llmconsole.app import answers, worker_main\n"
         "answers.METHODS['sleep'] = lambda: time.sleep(1000)\nworker_main.main()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(b'{"id": 1, "method": "sleep", "params": {}}\n')
    process.stdin.close()
    assert process.wait(30) == 0
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def test_a_module_that_lies_beside_the_evidence_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("numpy", "msgspec", "queue", "llmconsole"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with Worker(timeout=60) as worker:
        assert worker.call("rules")["rules"]
    assert not (tmp_path / "executed").exists()


def test_closing_and_aborting_leave_no_process():
    worker = Worker(timeout=60)
    first = worker.call("ping")["pid"]
    worker.close()
    assert is_gone(first)
    second = worker.call("ping")["pid"]
    worker.abort()
    worker.close()
    assert is_gone(second)


def test_a_caller_that_is_killed_takes_its_worker_along():
    script = (
        "import sys\nfrom llmconsole.app.worker import Worker\nworker = Worker()\n"
        "print(worker.call('ping')['pid'], flush=True)\nsys.stdin.read()"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert caller.stdin is not None
    assert caller.stdout is not None
    pid = int(caller.stdout.readline())
    caller.kill()
    caller.wait()
    for _ in range(400):
        if is_gone(pid) or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the worker lives on")
    for stream in (caller.stdin, caller.stdout):
        stream.close()
