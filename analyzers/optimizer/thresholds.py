"""Every threshold of the optimizer rules."""

#: Captured windows that are read: the first, the last, and those at and after an overflow.
FIRST_WINDOWS, LAST_WINDOWS, ODD_WINDOWS = 3, 3, 4
#: optimizer/step-mismatch.
#: Distance of the declared step, in tolerances, at which no other candidate is looked at.
SURELY_RIGHT = 0.4
#: Share by which the gradient that the optimizer saw may differ from a multiple of what backward left.
PROPORTIONAL = 1e-4
#: Share by which that multiple may differ from a named one.
SAME_FACTOR = 1e-3

#: optimizer/gradients-not-zeroed: leftover gradient, as a share of the window's gradient norm, that counts; windows.
CARRIED_SHARE, CARRIED_WINDOWS = 1e-3, 2

#: optimizer/gradient-chain-cut: recorded windows without a gradient; share of the trained tensors that is most of them.
NO_GRADIENT_STEPS, MOST_OF_THEM = 3, 0.5
#: Steps after which an adapter that started at zero has moved.
ADAPTER_MOVED_BY = 3

#: optimizer/no-master-weights: updates of less than this share of half a unit in the last place are surely rounded
#: away; elements that master weights would have moved, none of which moved (e⁻²⁰ by chance); lost share of the updates
#: from which it is a finding, and from which it is critical.
SURELY_LOST, EXPECTED_MOVED, LOST, LOST_CRITICAL = 0.9, 20.0, 0.5, 0.9

#: optimizer/decay-on-norm-or-bias: names shown.
NAMES_SHOWN = 12

#: optimizer/state-not-restored: a count of optimizer steps below this share of the step that it should be.
RESTARTED_SHARE = 0.5
#: Steps that a run must be old for a fresh optimizer to be odd.
OLD_ENOUGH = 10
#: Factor between the learning rates before and after a resume that no schedule explains.
RATE_JUMP = 2.0

#: optimizer/update-ratio: ‖Δw‖/‖w‖ outside the first is critical, outside the second worth a remark.
RATIO_CRITICAL, RATIO_USUAL = (1e-8, 10.0), (1e-5, 1e-1)
#: Share of the largest learning rate below which a small update is the schedule's doing.
SMALL_RATE = 0.1
#: Steps that a ratio must be out of bounds for.
RATIO_STEPS = 2

#: optimizer/recompute-rng: largest difference of outputs that reordered arithmetic explains beside other random
#: numbers, and beside the same.
RECOMPUTE_DRAWN, RECOMPUTE_ROUNDING = 1e-4, 1e-2

#: optimizer/adapter-merged-twice: share of the output's size below which an adapter's part cannot be told.
ADAPTER_SHARE = 1e-6

#: Share of the largest loss of a run below which nothing is left to do (update-ratio).
SOLVED = 1e-4
