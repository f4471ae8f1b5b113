"""Out-of-memory texts of every allocator: what each states in bytes, and what only looks like one."""

from __future__ import annotations

import pytest

from .conftest import Imports

GIB, MIB = 2**30, 2**20
TEXTS = {
    "a request of a few bytes, an impossible share, private pools": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256 bytes. GPU 3 has a total capacity of "
        "80.00 GiB "
        "of which 12.00 MiB is free. 60.00 GiB allowed; Process 11 has 17179869184.00 GiB memory in use. Process "
        "12 has "
        "4.50 GiB memory in use. Including non-PyTorch memory, this process has 74.50 GiB memory in use. Of the "
        "allocated "
        "memory 74.00 GiB is allocated by PyTorch, with 112.00 MiB allocated in private pools (e.g., CUDA Graphs), and "
        "64.00 MiB is reserved by PyTorch but unallocated.",
        {
            "requested": 256,
            "device": 3,
            "capacity": 80 * GIB,
            "free": 12 * MIB,
            "allocated": 74 * GIB,
            "reserved": 74 * GIB + 64 * MIB,
            "private_pools": 112 * MIB,
            "process_used": 74.5 * GIB,
            "other_processes": [{"pid": 12, "bytes": 4.5 * GIB}],
        },
    ),
    "report E4 (rapidsai/crossfit#18)": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacty "
        "of 47.50 "
        "GiB of which 11.00 GiB is free. Including non-PyTorch memory, this process has 36.50 GiB memory in use. "
        "Of the "
        "allocated memory 23.50 GiB is allocated by PyTorch, and 12.125 GiB is reserved by PyTorch but unallocated.",
        {"requested": 12 * GIB, "free": 11 * GIB, "allocated": 23.5 * GIB, "reserved": (23.5 + 12.125) * GIB},
    ),
    "ROCm": (
        "RuntimeError: HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 16.00 GiB "
        "of which "
        "7.00 GiB is free. Of the allocated memory 8.00 GiB is allocated by PyTorch, and 320.00 MiB is reserved "
        "by PyTorch",
        {"requested": 432 * MIB, "capacity": 16 * GIB, "reserved": None, "allocated": 8 * GIB},
    ),
    "XPU": (
        "RuntimeError: XPU out of memory. Tried to allocate 1.50 GiB (GPU 0; 15.50 GiB total capacity; 176.00 "
        "MiB already "
        "allocated; 180.00 MiB reserved in total by PyTorch)",
        {"requested": 1.5 * GIB, "capacity": 15.5 * GIB, "allocated": 176 * MIB, "reserved": 180 * MIB, "free": None},
    ),
    "NPU": (
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 5; 61.00 GiB total capacity; 58.00 GiB "
        "already "
        "allocated; 57.91 GiB current active; 1.25 GiB free; 59.00 GiB reserved in total by PyTorch) If reserved …",
        {"requested": 2 * GIB, "device": 5, "free": 1.25 * GIB, "reserved": 59 * GIB},
    ),
    "MPS": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 6.00 GB, other allocations: 0.50 GB, max "
        "allowed: 6.75 "
        "GB). Tried to allocate 459.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable",
        {"requested": 459 * MIB, "allocated": 6 * GIB, "capacity": 6.75 * GIB, "free": 0.25 * GIB},
    ),
    "torch before 1.4: cached leaves out what is allocated": (
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 8.00 GiB total capacity; 7.00 GiB "
        "already "
        "allocated; 88.00 MiB free; 16.00 MiB cached)",
        {"requested": 20 * MIB, "allocated": 7 * GIB, "free": 88 * MIB, "reserved": 7 * GIB + 16 * MIB},
    ),
    "the host's allocator": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 34359738368 bytes. Error code 12 (Cannot allocate memory)",
        {"requested": 32 * GIB, "where": "host", "device": None},
    ),
    "numpy": (
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 30.0 GiB for an array with shape (4,) and "
        "data type x",
        {"requested": 30 * GIB, "where": "host"},
    ),
    "the kernel": (
        "[1234.5] Memory cgroup out of memory: Killed process 4321 (pt_main_thread) total-vm:9kB, "
        "anon-rss:2048kB, file-r",
        {"where": "host", "type": "OOM killer", "pid": 4321, "process": "pt_main_thread", "allocated": 2 * MIB},
    ),
    "a scheduler": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.",
        {"where": "host", "type": "OOM killer"},
    ),
    "XLA": (
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        "17179869184 bytes.",
        {"requested": 16 * GIB},
    ),
    "TensorFlow": (
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with "
        "shape[64,1024] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
        {"requested": None, "where": None},
    ),
    "NCCL": (
        "node1:4129:4200 [3] NCCL WARN Cuda failure 2 'out of memory'",
        {"phase": "communication", "device": 3},
    ),
    "the driver, without a number": ("RuntimeError: CUDA error: out of memory", {"requested": None, "capacity": None}),
}


def memory_events(capsule) -> list[dict]:
    return [dict(each) for each in capsule.records("events") if each["kind"] == "oom"]


@pytest.mark.parametrize(("line", "expected"), TEXTS.values(), ids=TEXTS)
def test_what_a_text_states(imported: Imports, line: str, expected: dict):
    (event,) = memory_events(imported(f"step 1 loss 2.5\n{line}\n"))
    assert {name: event.get(name) for name in expected} == expected


@pytest.mark.parametrize("text", ["XLA", "TensorFlow", "the kernel"])
def test_an_error_alone_is_a_log(imported: Imports, text: str):
    assert len(memory_events(imported(f"{TEXTS[text][0]}\n"))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "INFO If you hit CUDA out of memory, lower the batch size",
        "config: oom_score_adj 3, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "Finding the largest batch that is not out of memory",
    ],
)
def test_advice_is_no_failure(imported: Imports, line: str):
    assert not memory_events(imported(f"step 1 loss 2.5\n{line}\nstep 2 loss 2.5\n"))


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([("train.py", "step"), ("/opt/torch/_tensor.py", "backward")], "backward"),
        (
            [("train.py", "main"), ("/opt/torch/optim/adamw.py", "step"), ("/opt/torch/optim/adamw.py", "_init_group")],
            "optimizer",
        ),
        ([("train.py", "evaluate"), ("/opt/torch/nn/modules/module.py", "_call_impl"), ("m.py", "forward")], "eval"),
        ([("train.py", "main"), ("/opt/torch/nn/modules/module.py", "_call_impl"), ("m.py", "forward")], "forward"),
        ([("train.py", "main")], None),
    ],
)
def test_the_stack_tells_the_phase(imported: Imports, frames: list[tuple[str, str]], phase: str | None):
    stack = "".join(f'  File "{file}", line 3, in {name}\n    call()\n' for file, name in frames)
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24 GiB"
    )
    (event,) = memory_events(
        imported(f"Traceback (most recent call last):\n{stack}{text} of which 1.00 GiB is free.\n")
    )
    assert event.get("phase") == phase
    assert (event["frames"][0]["file"], event["frames"][-1]["file"]) == (frames[-1][0], frames[0][0])


def test_the_kernel_kills_a_process_and_the_launcher_says_which_rank_that_was(imported: Imports):
    summary = "".join(
        f"  time      : 2026-11-30_07:26:23\n  host      : node7\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {pid})  ({signal})\n  error_file: <N/A>\n  traceback : Signal {-code} ({signal})\n"
        for rank, code, pid, signal in ((0, -15, 4320, "SIGTERM"), (3, -9, 4321, "SIGKILL"))
    )
    capsule = imported(
        "step 7 loss 2.5\n[123.4] Out of memory: Killed process 4321 (python) total-vm:9kB, anon-rss:2048kB, "
        "file-rss:0kB\n" + summary
    )
    (event,) = memory_events(capsule)
    assert (event["rank"], event["step"], event["pid"]) == (3, 7, 4321)
    assert {each["rank"]: each["exit"]["kind"] for each in capsule.records("ranks")} == {0: "signal", 3: "oom"}
