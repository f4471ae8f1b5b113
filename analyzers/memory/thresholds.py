"""Every threshold of the memory rules."""

#: Out of memory. Bytes by which sums of printed sizes may be off: three numbers of two decimals in GiB.
PRINTED = 16 << 20
#: Share of the device that the allocator holds unused however well it works: little slack.
LITTLE_SLACK = 0.05
#: Share of the device, and bytes, from which memory outside the allocator is more than contexts and libraries need.
OUTSIDE_SHARE, OUTSIDE_BYTES = 0.10, 2 << 30
#: The same where the process's own use is known, so that what is left belongs to others for certain.
OTHERS_SHARE, OTHERS_BYTES = 0.05, 1 << 30
#: Share of the device from which memory outside the allocator is no library of this process.
MOSTLY_OUTSIDE = 0.5

# Growth. Steps over which something grows before it is no warm-up, and blocks of one stack where the steps are only
# guessed from the trace.
GROWTH_STEPS, GUESSED_BLOCKS = 8, 32
#: Gap between two steps of growth, as a multiple of the usual one, beyond which it comes in bouts or has ended.
GROWTH_GAP = 3
#: Births in the later half beside the earlier half, below which a cache fills up.
STILL_GROWING = 0.5
#: Share of its blocks by which a stack must hold more at the end than when the growth began: a window of the last
#: hundred losses gets a block a step and gives one back.
NET_GROWTH = 0.8
#: A logged tensor: bytes of one block, blocks a step, and the share of them that are of one size.
LOGGED_BYTES, LOGGED_A_STEP, LOGGED_ALIKE = 16 << 20, 4, 0.8
#: Blocks of one size and stack that are more than a model has layers.
MANY_ALIKE = 200
#: A curve of allocated bytes: points, share of the level and bytes that it rises, and how even the quarters are.
CURVE_POINTS, CURVE_RISE, CURVE_BYTES, CURVE_EVEN = 20, 0.02, 32 << 20, 0.4
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
#: Share of what was wanted at the failure, below which a computed peak explains it not.
FAR_BELOW = 0.6
