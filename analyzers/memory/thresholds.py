"""Every threshold of the memory rules."""

#: Out of memory. Bytes by which sums of printed sizes may be off: three numbers of two decimals in GiB.
PRINTED = 16 << 20
#: Bytes that a driver says are free and hands out to nobody.
DRIVER_KEEPS = 64 << 20
#: Share of the device that the allocator holds unused however well it works: little slack.
LITTLE_SLACK = 0.05
#: The same of free and unused memory together: a device of which no more is left is full, however it is cut.
NO_SLACK = 0.02
#: Share of the unused memory that private pools must have in use, for what is unused to be theirs, perhaps.
PRIVATE_SHARE = 0.5
#: Share of the device, and bytes, from which memory outside the allocator is more than contexts and libraries need.
OUTSIDE_SHARE, OUTSIDE_BYTES = 0.10, 2 << 30
#: The same where the process's own use is known, so that what is left belongs to others for certain.
OTHERS_SHARE, OTHERS_BYTES = 0.05, 1 << 30
#: Share of the device from which memory outside the allocator is no library of this process.
MOSTLY_OUTSIDE = 0.5

# Growth. Steps over which something grows before it is no warm-up, and blocks of one stack where the steps are only
# guessed from the trace. Fewer steps will do where so many blocks from before the trace stand for the others.
GROWTH_STEPS, GUESSED_BLOCKS, FEW_STEPS, EARLIER_BLOCKS = 8, 32, 3, 48
#: Events behind the last step of training, as a multiple of the longest step, from which they are another phase.
STEPS_BEYOND = 3
#: Growth in bouts: how many, the bytes of all, and the multiple of the usual one by which a gap or a bout may differ.
RARE_TIMES, RARE_BYTES, RARE_GAP = 6, 32 << 20, 1.5
#: Gap between two steps of growth, as a multiple of the usual one, beyond which it comes in bouts or has ended.
GROWTH_GAP = 3
#: Births in the later half beside the earlier half, below which a cache fills up.
STILL_GROWING = 0.5
#: Share of its blocks by which a stack must hold more at the end than when the growth began: a window of the last
#: hundred losses gets a block a step and gives one back.
NET_GROWTH = 0.8
#: A logged tensor: bytes of one block, blocks a step, and the share of them that are of one size.
LOGGED_BYTES, LOGGED_A_STEP, LOGGED_ALIKE = 16 << 20, 4, 0.8
#: Lines of the forward pass that stay with a value, from which they are its graph; bytes of a block that is a scalar.
GRAPH_LINES, SCALAR_BYTES = 2, 512
#: Bytes a step that no job notices: 0.4 GiB in a hundred thousand steps.
TINY_A_STEP = 4 << 10
#: Blocks of one size and stack that are more than most models have layers.
MANY_ALIKE = 100
#: Growth a step in a log, as a multiple of the block, from which both tell of one thing.
LOGGED_GROWTH = 0.5
#: A curve of allocated bytes: points, share of the level and bytes that it rises, and how even the quarters are.
CURVE_POINTS, CURVE_RISE, CURVE_BYTES, CURVE_EVEN = 20, 0.02, 32 << 20, 0.4
#: Points that will do where each is higher than the one before, and the share of the level that they rise in all.
CURVE_FEW, CURVE_STEEP = 10, 0.2
#: Times that a curve fell back from which on what it gains is taken to be given back for good.
CURVE_CLEARED = 3
#: Share of the rise that one point may bring: larger ones are something new, not a leak.
CURVE_JUMP = 0.25
#: Share of what was gained by which a curve falls at the end of an epoch.
CURVE_RESET = 0.5
#: Rank correlation with the lengths from which memory follows them.
FOLLOWS_LENGTHS = 0.8
#: Rank correlation of lengths with their order from which they grow, and the points and the rise that this takes.
LENGTHS_GROW, LENGTHS_POINTS, LENGTHS_RISE = 0.9, 8, 0.2
#: Used by the device beyond what this process reserved: contexts, libraries and communication take up to some GiB.
BEYOND_BYTES, BEYOND_SHARE = 4 << 30, 0.10

#: Points at which the count of retries rose, from which on they are no accident of the start.
RETRIES = 3
#: Throughput beside the best of the run, once warm, below which the retries cost something.
STARVED = 0.8

#: Configuration. Batches and records that are looked through for it.
MOST_BATCHES = 256
#: Layers of the deepest model that is believed.
MOST_LAYERS = 2048
#: Share by which the number of parameters may differ from what the shape of a plain transformer gives.
SAME_PARAMETERS = 0.05

#: What would fit. Share of the device that is left free, since no allocator fills it.
ROOM_LEFT = 0.03
#: Share by which a computed peak may be off.
MODEL_ERROR = 0.1
#: Share of what was wanted at the failure, below which a computed peak explains it not.
FAR_BELOW = 0.6
#: Ranks of one node, over which sharding is tried where the job has fewer.
USUAL_RANKS = 8

#: Rise inside an evaluation: points, share of the steps that rise, share of the level and bytes in all.
EVAL_POINTS, EVAL_RISING, EVAL_RISE, EVAL_BYTES = 4, 0.8, 0.05, 16 << 20
#: Copies of the collected logits that concatenation makes, and how near the rise must be to that many.
EVAL_COPIES, EVAL_FIT = (1, 2, 3), 0.1
#: The same in a trace: batches, and the share of its blocks that a stack must keep.
EVAL_BATCHES, EVAL_KEPT = 8, 0.8
#: Share of the lines of the forward pass that stay: up to it outputs are collected, from the second on it is a graph.
OUTPUTS_SHARE, GRAPH_SHARE = 0.34, 0.5
#: Allocations of one stack in an evaluation, up to which it does not come round.
REPEATED = 2
#: Share of that rise which training may have, too.
EVAL_TRAINING = 0.5

#: Long tail. Steps before anything is said, points of warm-up, and lengths that count as constant.
TAIL_STEPS, TAIL_WARM_UP, TAIL_SAME = 8, 3, 1.05
#: A rise that counts, the rise in all, and the share of steps that may have the longest sample so far.
TAIL_STEP, TAIL_PEAK, TAIL_RECORDS = 0.02, 1.2, 0.3
#: Length beside the median at a failure; peak beside the usual level from which it is a warning.
TAIL_LONG, TAIL_FALL = 1.2, 1.5

#: Serving. Key-value events that are read of one capsule, and requests before a median of theirs is one.
MOST_EVENTS, SERVED = 2_000_000, 8
#: Times at which the load is looked at.
MOMENTS = 1000
#: Requests that leak, and their share of the pool, from which a leak is more than a remark.
LEAKED_REQUESTS, LEAKED_SHARE = 3, 0.05
#: References that a shared block counts, beside the requests that never gave theirs back.
REFERENCES = 0.8
#: Share of the requests that may be preempted.
PREEMPTED = 0.10
#: Prompt tokens in prefill at a failure, beside the median of other moments.
ADMITTED_TIMES = 2.0
#: An output without an end, beside the median; the share of the tokens that such outputs hold.
OUTPUT_TIMES, OUTPUT_SHARE = 4.0, 0.5
#: Pages that are needed beside those there are.
POOL_OVER = 1.0
