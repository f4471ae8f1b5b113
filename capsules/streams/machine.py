"""Records of ranks, memory, kernels and profiles. Sizes in bytes, fields ending in ``_ms`` in milliseconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .base import Count, Frame, Integer, Part, Record


class Collective(Record):
    """One collective as one rank saw it; times in Unix seconds."""

    group: str | int | None = None
    group_desc: str | None = None
    group_ranks: list[Count] | None = None
    seq: Count | None = None
    order: Count | None = None
    op: str | None = None
    dtype: str | None = None
    dtypes_out: list[str] | None = None
    shapes_in: list[list[Count]] | None = None
    shapes_out: list[list[Count]] | None = None
    state: Literal["scheduled", "started", "completed"] | None = None
    t_created: float | None = None
    t_started: float | None = None
    t_completed: float | None = None
    timeout_s: float | None = None
    default_timeout_s: float | None = None
    p2p: bool | None = None
    peer: Integer | None = None
    frames: list[Frame] | None = None
    async_op: bool | None = None
    waited: bool | None = None
    buffer_reused_before_wait: bool | None = None
    stream_synced: bool | None = None
    thread: str | int | None = None


class Exit(Part):
    """How a rank ended."""

    kind: Literal["ok", "oom", "exception", "signal", "hang"] | None = None
    message: str | None = None
    t: float | None = None


class RankSummary(Record):
    """One rank as a whole."""

    host: str | None = None
    clock_offset_s: float | None = None
    steps: Count | None = None
    samples_seen: Count | None = None
    samples_skipped: Count | None = None
    skip_reason: str | None = None
    exit: Exit | None = None
    last_seq: dict[str, Integer] | None = None
    last_started: dict[str, Integer] | None = None
    last_completed: dict[str, Integer] | None = None
    dump: bool | None = None
    dumped: float | None = None
    compute_ms: float | None = None
    communication_ms: float | None = None
    data_ms: float | None = None


class Scaling(Record):
    """Throughput (tokens/s) at one world size."""

    world_size: Count | None = None
    global_batch: Count | None = None
    throughput: float | None = None


class Memory(Record):
    """The memory ledger of one phase."""

    phase: str | None = None
    weights: Count | None = None
    gradients: Count | None = None
    optimizer: Count | None = None
    activations: Count | None = None
    communication: Count | None = None
    transient: Count | None = None
    fragmentation: Count | None = None
    kv_cache: Count | None = None
    allocated: Count | None = None
    reserved: Count | None = None
    peak: Count | None = None
    capacity: Count | None = None
    largest_free_block: Count | None = None


class Allocation(Record):
    """One action of an allocator; action ``live`` stands for ``count`` blocks of one stack that were not freed."""

    action: str | None = None
    address: Integer | str | None = None
    size: Count | None = None
    count: Count | None = None
    stream: Integer | None = None
    category: str | None = None
    frames: list[Frame] | None = None


class Block(Part):
    """One block of a segment."""

    size: Count | None = None
    state: str | None = None
    frames: list[Frame] | None = None


class Segment(Record):
    """One segment that the allocator holds."""

    address: Integer | str | None = None
    total: Count | None = None
    allocated: Count | None = None
    active: Count | None = None
    blocks: list[Block] | None = None


class Dtypes(Part):
    """The dtypes a kernel works in."""

    storage: str | None = None
    input: str | None = None
    accumulator: str | None = None
    reduction: str | None = None
    output: str | None = None


class KernelCheck(Record):
    """One comparison of a kernel with its reference; ``pass`` is forward or backward."""

    kernel: str | None = None
    direction: Literal["forward", "backward"] | None = msgspec.field(default=None, name="pass")
    case: str | None = None
    shape: Any = None
    strides: Any = None
    dtypes: Dtypes | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    rms: float | None = None
    tolerance: float | None = None
    nonfinite: Count | None = None
    max_abs_vs_first: float | None = None
    reference: str | None = None
    time_ms: float | None = None
    reference_ms: float | None = None
    syncs: Count | None = None
    backend: str | None = None
    ops: list[str] | None = None
    position_error: list[float] | None = None


class TopOperation(Part):
    """One operation of a profile."""

    name: str | None = None
    ms: float | None = None
    calls: Count | None = None
    shapes: Any = None
    dtype: str | None = None
    flops: float | None = None
    bytes: float | None = None


class Profile(Record):
    """Where the time of one window went.

    Of a device: ``window_ms`` = ``compute_ms`` + ``communication_ms`` (what no computation hides) + ``copy_ms`` (what
    neither hides) + ``idle_ms``; ``busy_ms`` is the time in kernels, ``communication_total_ms`` that of all
    communication. Of the idle time, ``idle_data_ms`` passes while data is loaded, ``idle_sync_ms`` while the host waits
    for the device, ``idle_gaps_ms`` in short gaps between kernels. ``overhead_ms`` is the profiler's own.
    """

    window_ms: float | None = None
    compute_ms: float | None = None
    communication_ms: float | None = None
    copy_ms: float | None = None
    idle_ms: float | None = None
    data_ms: float | None = None
    python_ms: float | None = None
    logging_ms: float | None = None
    sync_ms: float | None = None
    busy_ms: float | None = None
    communication_total_ms: float | None = None
    idle_data_ms: float | None = None
    idle_sync_ms: float | None = None
    idle_gaps_ms: float | None = None
    overhead_ms: float | None = None
    # share of the time from the device's first to its last work in the whole trace, copies too, in which it has some
    busy_first_to_last: float | None = None
    # of a torn trace: share of the launches without device work, or of that work without its launch
    lost: float | None = None
    kernels: Count | None = None
    devices: Count | None = None
    profiler: dict[str, bool] | None = None
    loader: str | None = None
    launches: Count | None = None
    recompiles: Count | None = None
    graph_breaks: Count | None = None
    top: list[TopOperation] | None = None
