"""Every threshold of the distributed rules."""

# -- steps, speed, replicas, data, gradients, buffers, paths

#: Ranks listed one by one in evidence.
RANKS_SHOWN = 16
#: distributed/uneven-steps: counts so far apart are no job that was cut within a step.
STEPS_APART = 2
#: Steps whose micro-batches are compared; share of them that differ from which on batches are filled by tokens; steps
#: below which that share says nothing.
MOST_STEPS, DYNAMIC_SHARE, STEPS_TO_COMPARE = 100_000, 0.2, 3
