"""Versions, hardware and launch variables as a capsule keeps them: by allow-list, so that no secret is among them."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Packages that can change what a training or serving job computes.
PACKAGES = (
    *("torch", "numpy", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "peft", "trl"),
    *("deepspeed", "megatron-core", "torchtitan", "torchao", "torchvision", "torchaudio", "lightning", "triton"),
    *("flash-attn", "xformers", "bitsandbytes", "apex", "transformer-engine", "liger-kernel", "vllm", "sglang"),
    *("flashinfer-python", "sentencepiece", "tiktoken", "einops", "ray", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "h5py", "msgspec", "llmconsole"),
)
# Variables that steer numerics, devices and communication; none of them carries a credential.
VARIABLES = re.compile(
    r"(CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS)|CUBLAS_WORKSPACE_CONFIG|NCCL_[A-Z0-9_]+"
    r"|TORCH_(NCCL_[A-Z0-9_]+|DISTRIBUTED_DEBUG|COMPILE_DISABLE|LOGS|SHOW_CPP_STACKTRACES)|PYTORCH_[A-Z_]*ALLOC_CONF"
    r"|NVIDIA_TF32_OVERRIDE|OMP_NUM_THREADS|MKL_NUM_THREADS|PYTHONHASHSEED|TOKENIZERS_PARALLELISM|GLOO_SOCKET_IFNAME"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS)"
    r"|SLURM_(JOB_ID|STEP_ID|PROCID|NTASKS|NNODES|RESTART_COUNT|JOB_PARTITION)|FLASH_ATTENTION_DETERMINISTIC)"
)


def environment() -> dict[str, Any]:
    """The manifest's ``environment``: interpreter, torch, device libraries, packages, flags, launch variables."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "container": container(),
        "packages": packages(),
        "deterministic": {
            "algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "threads": torch.get_num_threads(),
        },
        "variables": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)},
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["gpu"] = torch.cuda.get_device_name()
        found["nccl"] = _nccl()
        found["driver"] = _driver()
        found["deterministic"]["tf32"] = torch.backends.cuda.matmul.allow_tf32
    return {name: value for name, value in found.items() if value is not None}


def packages() -> dict[str, str]:
    """Versions of the allow-listed packages that were installed when this was first asked in the process."""
    return dict(_packages())


@functools.cache
def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def placement(model: Any, rank: int) -> dict[str, Any]:
    """Where this rank computes, and how large that device's memory is in bytes."""
    import torch

    parameter = next(iter(model.parameters()), None) if model is not None else None
    device = parameter.device if parameter is not None else torch.device("cpu")
    found: dict[str, Any] = {"rank": rank, "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"name": properties.name, "memory": properties.total_memory}
    return {"ranks": [found]}


def title(run: Mapping[str, Any] | None) -> str:
    """What a list calls this run: its name, else the script's; empty where neither is known."""
    if run and run.get("name"):
        return str(run["name"])
    script = Path(sys.argv[0] if sys.argv else "")
    if script.stem == "__main__":  # python -m package
        return script.parent.name
    return "" if script.stem in ("", "-c", "-m") else script.stem


def run(rank: int, world_size: int) -> dict[str, Any]:
    """The manifest's ``run`` as far as the process can tell: host, command, seed, launcher, revision of the code."""
    import torch

    found: dict[str, Any] = {
        "host": platform.node(),
        "world_size": world_size,
        "command": [Path(sys.executable).name, *sys.argv],
        "seed": torch.initial_seed() % 2**63,
        "restart": restart_count(),
        "code": code_revision(Path(sys.argv[0]).resolve().parent if sys.argv and sys.argv[0] else Path.cwd()),
    }
    if world_size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
        found["backend"] = torch.distributed.get_backend()
    return {name: value for name, value in found.items() if value is not None}


def restart_count() -> int | None:
    """How many times the launcher has started this job again, where it says so."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return None


def code_revision(directory: Path) -> dict[str, Any] | None:
    """Commit that the code was started from, and whether tracked files differ from it; None outside git."""
    command = ("git", "--no-optional-locks", "-C", str(directory))
    try:
        head = subprocess.run((*command, "rev-parse", "HEAD"), capture_output=True, text=True, timeout=5, check=True)
        changed = subprocess.run(
            (*command, "status", "--porcelain", "--untracked-files=no"),
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": head.stdout.strip(), "dirty": bool(changed.stdout.strip())}


def container() -> str | None:
    """The kind of container around this process, where there is a sign of one."""
    for name in ("APPTAINER_NAME", "SINGULARITY_NAME"):
        if name in os.environ:
            return f"apptainer {Path(os.environ[name]).name}"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if Path("/.dockerenv").exists():
        return "docker"
    return "podman" if Path("/run/.containerenv").exists() else None


def _nccl() -> str | None:
    import torch

    try:
        version: Any = torch.cuda.nccl.version()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, RuntimeError):
        return None
    return ".".join(str(part) for part in version) if isinstance(version, tuple) else str(version)


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", path.read_text())
    except OSError:
        return None
    return found[1] if found else None
