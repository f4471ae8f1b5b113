"""Every threshold of the performance rules. Shares are of the time of the steps that are judged."""

from __future__ import annotations

from typing import Final

#: Windows that are judged: a first one so many times as long as the median of the others is warm-up, and a profiler
#: that itself took this share of a window measured itself.
WARM_UP, OVERHEAD = 2.0, 0.1
#: Share of a step's launches without device work, or of its work without a launch, in a torn trace: it is not judged.
LOST: Final = 0.02
#: Of its share of all the time a cause takes this much in the median step: one long step (an evaluation) is none.
TYPICAL: Final = 0.5
#: Number of a step from which on it says something alone.
SETTLED: Final = 2
#: performance/input-bound: share of the time in which the device idles while data is loaded, over all steps and in the
#: median step (one long wait, at the beginning of an epoch, is none).
INPUT, INPUT_MEDIAN = 0.15, 0.08
#: performance/communication-bound: share in collectives that no computation hides, on the rank that waits least.
COMMUNICATION: Final = 0.25
#: Ranks of which the least waits less than this share of the median wait for one of them: a straggler, not a network.
WAITING: Final = 0.5
#: performance/launch-bound: share in short gaps between kernels; kernels a step; mean length of a kernel in µs.
GAPS, GAP_KERNELS, SHORT_KERNEL = 0.3, 100, 25.0
#: performance/gpu-idle: share of idle time in a trace that no other rule explains.
IDLE: Final = 0.5
#: And of a monitor: utilisation below, for so many seconds with so many samples; below which a device is not the job's.
UTILIZATION, IDLE_SECONDS, IDLE_SAMPLES, UNUSED = 0.5, 60.0, 10, 0.05
#: Share of the most memory that was in use on a device, below which no job is on it.
DESERTED: Final = 0.03
#: Times the usual distance of two samples, beyond which a monitor did not look.
BREAK: Final = 10.0
#: Share of the samples before a stop that are high in a job that worked, and of its memory that is kept after it.
STEADY, HELD = 0.9, 0.8
#: Saw-tooth: utilisation that crosses from below the first to above the second so many times.
LOW, HIGH, TEETH = 0.2, 0.8, 4
#: performance/compute-bound: share of the time in which the device computes.
COMPUTE: Final = 0.8
#: Operations, and signs of an operation's name, that are shown.
SHOWN, SIGNS = 3, 120
