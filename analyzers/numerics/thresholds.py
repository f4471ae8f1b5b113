"""Every threshold of the numerics rules, in one place; each appears in a finding's evidence as ``expected``.

Where a comment names a run, it is a byte-level GPT of 0.7 M parameters trained with AdamW on source text, batch 8.
"""

from __future__ import annotations

from typing import Final

#: Largest finite number of a dtype.
DTYPE_MAX: Final = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}

# Loss and gradient norm.
#: Steps at the start whose maximum is the yardstick of an explosion.
FIRST_STEPS: Final = 100
#: Fewest earlier values before a maximum of "the first" means anything.
MIN_HISTORY: Final = 20
#: Multiple of the first steps' maximum that is an explosion.
EXPLOSION_FACTOR: Final = 10.0
#: Gradient norm that is large by itself, when the loss rises with it.
GRADIENT_LARGE: Final = 100.0
#: … and above this multiple of the recent median: with summed losses it is large throughout.
GRADIENT_GROWN: Final = 3.0
#: How far above the median of the last 20 a gradient norm is to take part in a spike or a rise.
GRADIENT_PARTNER: Final = 2.0
#: Points before an explosion in which the beginning of the rise is looked for.
LONGEST_RISE: Final = 500

#: Trailing window of a loss spike and its width in standard deviations.
SPIKE_WINDOW: Final = 128
SPIKE_SIGMA: Final = 6.0
#: Fewest values in the window: sixteen estimate a standard deviation to about ±18 %.
SPIKE_MIN_WINDOW: Final = 32
#: Short window, and the multiple of its median that is a spike when the gradient norm agrees.
RECENT_WINDOW: Final = 20
RECENT_FACTOR: Final = 2.0
#: A spike must rise by this share of the loss at the start: a memorised set jumps by large factors of nothing.
SPIKE_MIN_RISE: Final = 0.02
#: Steps within which a benign spike is back at its level. Real 124 M runs are back at the next step.
RECOVERY_STEPS: Final = 30
#: … and points, where a log has fewer than this in so many steps.
RECOVERY_POINTS: Final = 5
#: Robust standard deviations within which the level counts as reached again.
RECOVERY_SIGMA: Final = 3.0
#: An unfinished series ends in a spike: below this many σ it may as well be a benign one (real ones reach 9).
END_SIGMA: Final = 12.0
#: Steps around a spike in which an event (mixture, context length, checkpoint) is its neighbour.
EVENT_NEIGHBOURHOOD: Final = 3
#: Standard deviations from which a sample or its neighbours are unusual, as evidence for a spike's cause.
SAMPLE_SIGMA: Final = 6.0
SAMPLE_HIGH: Final = 2.0

#: Other data: token frequencies this far (total variation) from those before, and this multiple of their own scatter.
#: Batches of 384 bytes of one text scatter by 0.2; easy rows followed by source text lie 0.9 away.
DATA_SHIFT: Final = 0.5
DATA_SHIFT_OF_USUAL: Final = 2.0

# Symptoms of a run that leaves its path.
#: Before there are this many losses, a symptom is a loss above ``EARLY_FACTOR`` × all before.
SYMPTOM_MIN_HISTORY: Final = 8
EARLY_FACTOR: Final = 1.5
#: Later: above the recent median by this many robust σ, by this share of the median and of the loss at the start.
SYMPTOM_SIGMA: Final = 6.0
SYMPTOM_RELATIVE: Final = 0.5
SYMPTOM_OF_START: Final = 0.05

# Learning rate.
#: ‖Δw‖/‖w‖ of one step beyond which a step replaces the weights more than it improves them. Runs at 1e-3 start at
#: 0.024, at 3e-3 at 0.07 and stay sound; at 3e-2 0.71, at 1e-1 2.4, and SGD at 1 0.17: all break within three steps.
UPDATE_RATIO: Final = 0.1
#: Without a warm-up the first steps may be too large below that limit, too.
UPDATE_RATIO_NO_WARMUP: Final = 0.05
NO_WARMUP_STEPS: Final = 20
#: Where a step replaces the weights outright, a loss barely above all before it, or bouncing off its lowest, is symptom
#: enough. At 3e-2 (ratios 0.7 and 0.9) 6.1 follows 5.6, or 5.5 follows 3.2; at 1e-2 (0.24, 0.3) 3.5 follows 2.9.
UPDATE_REPLACED: Final = 0.4
REPLACED_WINDOW: Final = 5
WEAK_OVER_HIGHEST: Final = 1.05
WEAK_OVER_LOWEST: Final = 1.3
#: Steps before a symptom in which its cause is looked for.
CAUSE_WINDOW: Final = 20
#: A gradient norm beyond this multiple of the earlier median is itself the oddity, not the learning rate.
GRADIENT_ORDINARY: Final = 10.0
#: Change of the learning rate from one step to the next that is a jump, and the steps it has to show a symptom.
JUMP_FACTOR: Final = 10.0
JUMP_WINDOW: Final = 50
#: Steps at zero, or at one value where the schedule moves, before the scheduler is called frozen.
ZERO_STEPS: Final = 10
FROZEN_STEPS: Final = 20
#: After a decay, zeros must be this share of the steps before: logs print a small rate as 0.000000.
ZERO_SHARE: Final = 0.02
#: Share of skipped steps from which a schedule that ignores them matters.
SKIPPED_SHARE: Final = 0.1
#: Relative change that the schedule must predict over the recorded steps.
FROZEN_CHANGE: Final = 0.1
#: Fall of the loss (share of its start) which shows that the model does learn, whatever the logged rate says.
LEARNING_FALL: Final = 0.05

# Float16.
#: "Near" the largest float16 number: within this factor of it.
NEAR_FACTOR: Final = 2.0
#: A tensor that turns NaN without an Inf in sight must have been this near before.
NAN_NEAR_FACTOR: Final = 4.0
#: Growth between the earlier records of a tensor and the last one before the limit.
GROWTH_FACTOR: Final = 1.3
#: The last record before must be within this factor of the value that follows; more is a jump, not growth.
JUMP_NOT_GROWTH: Final = 16.0
#: Ratio of the largest element to the root mean square that activations rarely exceed by much.
USUAL_CREST: Final = 16.0
#: An Inf whose finite neighbours are below 65504 / this factor came from a division or a logarithm, not from size.
INF_NEIGHBOUR_FACTOR: Final = 64.0
#: Records of a tensor shown as its trajectory.
TRAJECTORY: Final = 6
#: Scale from which a search at the start is wasteful (2²⁴; 2¹⁰ to 2¹⁷ is where scales settle), and steps it takes.
SEARCH_FROM: Final = 2.0**24
SEARCH_STEPS: Final = 4
#: Loss scale at which there is nothing left to halve, and the halvings in a row that lead there.
SCALE_FLOOR: Final = 2.0
MIN_HALVINGS: Final = 5

# Gradients that are absent or next to nothing.
#: Reported norms of exactly 0 in a row that are more than a hiccup; two suffice where they lie this far apart.
ZERO_NORM_POINTS: Final = 3
ZERO_NORM_SPAN: Final = 5
#: … and that leave no doubt.
ZERO_NORM_SURE: Final = 5
#: A first step up to this one is the beginning of the run.
RUN_START: Final = 10
#: Fall of the loss, as a share of its level at the start, below which it counts as flat.
FLAT_LOSS: Final = 0.01
#: Share of the loss at the start below which nothing is left to learn.
CONVERGED_SHARE: Final = 0.02
#: Gradient norm or mean magnitude of a gradient that moves nothing: ten times Adam's usual epsilon.
VANISHING: Final = 1e-7
VANISHING_RECORDS: Final = 3
#: Growth over the small records that shows a gradient on its way up (an adapter's first factor).
VANISHING_GROWS: Final = 3.0
#: Share of what the other parameters get that is vanishing and not merely small.
VANISHING_SHARE: Final = 1e-3
#: Gradient norm of a model that does train, however small its single elements: 1e-7 · √(10⁹) = 0.003.
NORM_ALIVE: Final = 1e-4

# Too few bits.
#: Share of subnormal among the non-zero gradient elements of the median tensor that is underflow by itself.
SUBNORMAL_SHARE: Final = 0.5
#: Rise of the share of zero and subnormal elements, and the subnormal share that tells it from structural zeros.
UNDERFLOW_RISE: Final = 0.2
SUBNORMAL_TRACE: Final = 0.05
#: Error of rounding a result once, in units of roundoff (root mean square of a uniform half unit: 0.43 measured).
ROUNDED_ONCE: Final = 0.45
#: Scatter of row scales, in units of roundoff: a rounded mean or root leaves 0.45 to 0.53, rounding the result alone
#: up to 0.17 (a scale next to 1 is snapped to 1). And the rows it takes.
NORM_SCALE: Final = 0.3
NORM_ROWS: Final = 8

# Single layers.
#: Steps back from the end of the record in which growth counts, and the fewest records of a layer.
TRACK_WINDOW: Final = 500
TRACK_RECORDS: Final = 5
#: Fewest layers among which one can stand alone.
TRACKS: Final = 4
#: Growth of a layer, and how much faster it must be than the median of the others.
OUTLIER_GROWTH: Final = 10.0
OUTLIER_ALONE: Final = 4.0
#: Records in a row with nothing but zeros: after others, and where there were no others.
DEAD_RECORDS: Final = 3
DEAD_FROM_START: Final = 5

# Overfitting.
#: Fewest evaluations, and fewest of them after the best.
EVALUATIONS: Final = 3
EVALUATIONS_AFTER: Final = 2
#: Rise above the best, as its share and in units of the evaluations' own scatter.
OVERFIT_RISE: Final = 0.02
OVERFIT_SIGMA: Final = 3.0
#: Rise, as a share, that needs no further sign: three epochs of 1.00, 1.15 and 1.40 say enough.
OVERFIT_PLAIN: Final = 0.1
#: Fall of the training loss over the same steps, as a share.
TRAIN_FALL: Final = 0.02

# Convergence.
#: Fewest losses of a run, and the share of them at its end, over which progress is judged.
CONVERGENCE_POINTS: Final = 60
CONVERGENCE_TAIL: Final = 0.5
#: Divergence: rise above the lowest level, as its share and in standard deviations, and the part of the run
#: that rises.
DIVERGENCE_RISE: Final = 0.1
DIVERGENCE_SIGMA: Final = 6.0
DIVERGENCE_TAIL: Final = 1 / 3
#: Plateau: the largest fall over the tail that the interval allows, as a share of the level; the level beside the
#: start.
PLATEAU_FALL: Final = 0.02
PLATEAU_LEVEL: Final = 0.5
#: A first loss from which a run is taken to start from scratch, where nothing declares it (nats; ln V of 256 is 5.5).
SCRATCH_LOSS: Final = 5.0
#: Learning rate, as a share of its maximum, below which nothing is expected to move.
RATE_SPENT: Final = 0.1
#: Oscillation: noise of the tail as a share of its level, and beside what the spread of the samples explains.
OSCILLATION_NOISE: Final = 0.1
OSCILLATION_EXCESS: Final = 3.0
#: … unless that noise falls below this share where the tail is parted at one step: it jumped and did not swing.
OSCILLATION_PARTED: Final = 0.5
#: … or beside the calmest stretch before; or correlation of neighbours (0 for noise, −1 for values that alternate).
OSCILLATION_GROWN: Final = 4.0
ALTERNATION: Final = -0.5
#: A loss below this is no cross-entropy in nats (policy gradients, rewards) and is not judged.
LOSS_LIKE: Final = 0.05

# Evaluation.
#: Root mean square by which the losses of one sample's tokens may differ in two batches, in units of roundoff times the
#: size of the logits; and the least that counts, relative to that size (float32 in deep models).
EVAL_ROUNDING: Final = 3.0
EVAL_FLOOR: Final = 2e-5
#: Repeats of a loss agree to this share of it; of other scores their range stays within so many standard errors.
REPEAT_SHARE: Final = 2e-3
REPEAT_ERRORS: Final = 4.0
#: Share of tokens that two readings of one validation sample have in common from which it is one sample, changed.
SAME_SAMPLE: Final = 0.5
#: Rows of each split whose first token is compared, and the share of rows that is "all" and "none".
OPENING_ROWS: Final = 8
OPENING_ALL: Final = 0.9
#: A score has fallen where noise alone would show such a fall in any of the evaluations with at most this probability.
DROP_CHANCE: Final = 0.05
