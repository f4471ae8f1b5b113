"""Every threshold of the rules on calls that ranks make together."""

#: Ranks that must have made a call for a majority among them to decide which is the deviating one.
DECIDING_RANKS = 3
#: Calls that one rank may have skipped, or made in addition, in one place; and that it may have exchanged.
LONGEST_EDIT, LONGEST_EXCHANGE = 64, 4
#: Calls behind the first difference that are compared to tell a skipped call from another one.
COMPARED = 256
#: Calls of the common history by which a continuation that nobody has made yet is foretold.
CONTEXT = 3
#: Differences that are named in one group.
DIFFERENCES = 4
#: How many times more ranks than those that leave a program must go on with it: fewer are a role of their own.
FEW = 2
#: Roles of ranks, by what they call, that are told apart; cells of rank × call that are compared for that.
ROLES, MOST_CELLS = 256, 1 << 25
#: Calls by which ranks may lie apart in dumps of a job that runs, each with its newest call in flight.
APART = 3
#: Calls of a group back to which is looked for what a rank does between two of them.
ROUNDS = 16
#: Seconds after which a call without a known time-out is overdue: NCCL's default, and Gloo's.
NCCL_TIMEOUT_S, GLOO_TIMEOUT_S = 600.0, 1800.0
#: Seconds of waiting, and multiple of the longest completed call of the group, that are a standstill when a job was
#: killed before the time-out.
STANDSTILL_S, STANDSTILL_FACTOR = 30.0, 20.0
#: Share of the time-out before which a dump was not written for it, and from which on it was, up to so many seconds
#: after; a dump that is younger was copied.
TOO_EARLY, IN_TIME, WRITTEN_WITHIN_S = 0.5, 0.95, 900.0
#: Ranks that are listed one by one in a sentence.
LISTED = 8
#: Seconds by which an exit may lie behind the calls that wait for the rank and still be the reason (clocks differ).
CLOCK_S = 2.0
#: Seconds before the first call in flight at which an end is of an earlier life of the job: lines name no time zone.
DUMPED_LATER_S = 86_400.0

# -- accounts of ranks: steps, speed, replicas, data, gradients, buffers, paths

#: Ranks listed one by one in evidence.
RANKS_SHOWN = 16

#: distributed/uneven-steps: counts so far apart are no job that was cut within a step.
STEPS_APART = 2
#: Steps whose micro-batches are compared; share of them that differ from which on batches are filled by tokens; steps
#: below which that share says nothing.
MOST_STEPS, DYNAMIC_SHARE, STEPS_TO_COMPARE = 100_000, 0.2, 3

#: distributed/duplicate-data: share of a rank's rows that another has at the same place, rows that it must be.
DUPLICATE_SHARE, FEWEST_ROWS = 0.5, 2
#: Chance of so many by independent draws, at the same places (from no more samples than were seen, though there will be
#: more) and at any.
AT_ONE_PLACE, BY_CHANCE = 1e-3, 1e-6
#: Share of a rank's rows that must be new ones; share of samples that several ranks draw at different steps.
NEW_ROWS, SPREAD_SHARE = 0.5, 0.2
#: Captured batches, and rows of each, that are read where no digests were recorded.
BATCHES_READ, ROWS_READ = 256, 512

#: distributed/straggler: relative speed; least cost of a step, in seconds and as a share of the step; share of the
#: steps in which the same rank is slow; share of the loss that late input explains.
SLOW, LOST_SECONDS, LOST_SHARE, PERSISTENT, EXPLAINED = 0.7, 5e-3, 0.1, 0.6, 0.6
#: Scatter of the other ranks from which on the same rank must be slow in a larger share of the steps.
NOISE, PERSISTENT_IN_NOISE = 0.25, 0.8
#: Share of the step that late input must cost where it alone is compared.
LOST_TO_INPUT = 0.2
#: Steps left out at the start (a third of them at most), and steps read.
WARM_UP_STEPS, STEPS_READ = 3, 2000
#: Fewest steps that say anything: where the own times of the other ranks are steady, where they are anything but, and
#: so many more for a scatter as large as they are; chance at which all times of a rank may be above all of the others,
#: and how many times as long and seconds longer it must take: what a scheduler takes from a rank is tens of ms.
FEWEST_PIECES, NOISY_PIECES, PIECES_PER_NOISE, BY_LUCK, APART, APART_SECONDS = 3, 12, 36, 1e-3, 3, 0.1
#: Fewest calls of all ranks, and pieces they are cut into; quantile of a rank's distance that is its clock's.
FEWEST_CALLS, PIECES, CLOCK_QUANTILE = 4, 40, 0.05
#: Share of calls, fewest of them, and seconds, by which a rank that queues its calls after all others is worth a look.
LAGGING, FEWEST_LAGGING, LAG_SECONDS = 0.9, 10, 0.02
#: Steps, and share and seconds of a step, from which on a loss that moves from rank to rank is worth a remark.
TURNS, TURNS_SHARE, TURNS_SECONDS = 20, 0.3, 0.02

#: distributed/gradient-scale: share by which norms of one gradient differ on replicas at most; steps that must differ
#: (fewer where there are fewer); share beyond the mean of the local norms; share by which norms of equal ones differ.
SAME_NORM, NORM_STEPS, BEYOND_MEAN, EQUAL_NORM = 1e-3, 2, 0.01, 1e-4
#: Share of the steps at which a scale must show, and fewest of them where not every rank's norm is known.
MOST_OF_STEPS, RATIO_STEPS = 0.5, 5
#: Share beyond the local norms where only some are known; part of 1/√W, the length of a mean of unrelated gradients.
BEYOND_SOME, UNRELATED = 0.2, 0.75

#: Part of the model's size that a reduction of gradients or parameters has; fewest averages, and largest share of the
#: steps, that are one now and then.
AS_LARGE, AVERAGES, NOT_EVERY = 0.5, 2, 0.75

#: distributed/unwaited-buffer: calls that a rank makes later, where steps are not known, from which on a wait is no
#: longer to come (the recorder says "not waited" once the handle is gone).
CALLS_LATER = 1

#: distributed/scaling: efficiency; share by which throughputs differ at most that may be of one rank each; share of the
#: proportional growth of the global batch; share of communication in a step.
EFFICIENT, LEVEL, GROWN, COMMUNICATING = 0.7, 0.1, 0.75, 0.3
