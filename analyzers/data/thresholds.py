"""Every threshold of the data rules, in one place; each appears in a finding's evidence as ``expected``."""

from __future__ import annotations

from typing import Final

# One sample among others.
#: Trailing window in steps, reaching further back while it holds fewer samples than the second number; the fewest
#: samples and steps from which a spread is known.
WINDOW_STEPS: Final = 32
WINDOW_SAMPLES: Final = 64
MIN_SAMPLES: Final = 48
MIN_STEPS: Final = 6
#: Robust standard deviations that are far out. Source text passes them now and then: in five runs of 1,600 samples a
#: line of dashes reached 8.3 and another row 6.0.
FAR_SIGMA: Final = 6.0
#: A sample that is worse than a uniform guess over the vocabulary by this many nats is hardly text (random bytes after
#: 100 steps: 1.7 and rising; the line of dashes: 0.8; nothing else above 0.5) …
WORSE_THAN_GUESS: Final = 1.0
#: … and it must exceed the largest deviation of the window by this factor.
BEYOND_USUAL: Final = 1.1
#: … by this one it must exceed it to be more than a remark where nothing went wrong after it: upper-case constants in
#: a corpus of program text cost 6.9 nats where the window had seen 5.9 (1.3), random bytes were at 2.6 and more.
CLEARLY_BEYOND: Final = 1.5
#: Where that guess is not known or not reached: far beyond anything the window has seen. Text of a healthy run reached
#: 10.7 (5.3 nats among 2.8, below the guess of 5.5), so from the first number on it is noted and only from the second
#: on a warning.
VERY_FAR_SIGMA: Final = 10.0
EXTREME_SIGMA: Final = 20.0
FAR_BEYOND_USUAL: Final = 2.0
#: Share of a step's loss that one sample may carry, and the fewest samples for which a share means anything.
LOSS_SHARE: Final = 0.5
SHARE_MIN_SAMPLES: Final = 4
#: The step's other samples must be ordinary: within this many robust σ of the window.
OTHERS_SIGMA: Final = 3.0
#: A share counts only from this part of the loss at the start: a memorised set has shares of nothing.
MIN_OF_START: Final = 0.05
#: A sample as short as a line of source text may be nothing but a ruler of dashes or slashes, as improbable to a young
#: model as random bytes (7.3 nats, 9.9 σ). A longer one of that kind is junk, too.
LINE_TOKENS: Final = 120
#: A row with less than this share of the smallest variety among its neighbours repeats itself.
REPETITIVE: Final = 0.5
#: No repetition is worse than this multiple of a uniform guess.
EXTREME_OF_GUESS: Final = 2.0
#: A mean over fewer tokens than this is one or two surprising tokens (answers of one to five: 9 nats in a sound run).
MIN_LOSS_TOKENS: Final = 16
#: Steps within which a bad sample shows its harm.
HARM_STEPS: Final = 20
#: Later samples that must be ordinary again where a step has a single sample.
SINGLE_AFTER: Final = 4

# All rules on captured batches.
#: Batches looked at; of more an even choice.
MOST_BATCHES: Final = 64

# Lengths.
#: A sample is far out beyond this multiple of the 95th percentile, where there are at least so many samples …
OUTLIER_OF_P95: Final = 3.0
OUTLIER_MIN_SAMPLES: Final = 20
#: … and where neither a log-normal nor a power law through the ordinary samples would bring one so long in a hundred
#: (log-normal) or twenty (power law) sets of that size. Log-normal lengths with σ = 1 hold 0.3 % beyond 3 × p95.
TAIL_CHANCE: Final = 0.01
HEAVY_TAIL_CHANCE: Final = 0.05
#: Samples above this quantile are the tail to which the power law is fitted.
TAIL_FROM: Final = 0.8
PADDING_SHARE: Final = 0.5
#: Truncation: share of samples at exactly the greatest length, or marked as cut.
CUT_SHARE: Final = 0.05
#: All rows of one length are packed rows or a stream cut to pieces, and nothing can be said.
FIXED_LENGTH_SHARE: Final = 0.95
#: At the greatest length there must be this many times as many samples as at each of the lengths just below, or the
#: lengths simply go so far.
CUT_OVER_NEIGHBOURS: Final = 3.0
CUT_MIN_SAMPLES: Final = 3
#: Lost ends: share of shorter rows that end in EOS, and of rows of the greatest length that do not.
ENDS_SHARE: Final = 0.8

# Labels.
#: Share of supervised labels that must equal the token of a layout for the layout to be what the job means.
LAYOUT_AGREEMENT: Final = 0.999
#: Rows that fit less than this in every layout fit nothing; a row needs so many labels to be judged.
GARBAGE_AGREEMENT: Final = 0.5
GARBAGE_MIN_LABELS: Final = 8
#: Of the positions at which labels differ, the share with one and the same input id that makes it a mask token, and
#: the fewest.
MASK_TOKEN_SHARE: Final = 0.5
MASK_TOKEN_LEAST: Final = 3
#: Below this agreement labels shifted by the collator are wrong; above, the tokens cut at document ends explain it.
SHIFTED_CUT_AGREEMENT: Final = 0.9
#: Offsets tried: of what token, counted from its own position, a label is the id.
LABEL_OFFSETS: Final = (0, 1, 2, -1, 3, -2)

# Masks.
#: Positions that must disagree.
MASK_MIN_POSITIONS: Final = 2

# Template and special tokens.
#: Share of rows without the template, or with two leading BOS, from which it is more than a row or two.
ROWS_SHARE: Final = 0.05
BOS_ROWS_SHARE: Final = 0.5
SPECIAL_MIN_ROWS: Final = 2

# Repeats.
#: Batches known, fewest repeats in a row that make a pattern, share of new batches that must follow for the data not
#: to be used up (in a further epoch there is nothing new).
REPEAT_MIN_BATCHES: Final = 4
REPEAT_RUN: Final = 3
NEW_AFTER_SHARE: Final = 0.05
#: Batches after a checkpoint was loaded within which a replay must begin.
RESUME_BATCHES: Final = 2

# Splits.
#: Validation samples also trained on: from this share on the validation loss is no validation.
LEAK_CRITICAL: Final = 0.1
#: Samples so short that two of them are alike by chance.
LEAK_MIN_TOKENS: Final = 8

# Variety.
#: n-grams of this length, the least share of distinct ones, rows and tokens needed.
DIVERSITY_N: Final = 8
DISTINCT_SHARE: Final = 0.2
DIVERSITY_MIN_ROWS: Final = 16
DIVERSITY_MIN_TOKENS: Final = 1_000
#: Above this every second answer is left out: counting sorts them all.
DIVERSITY_MOST_TOKENS: Final = 200_000
#: Openings: tokens of the answer compared, the share that may agree, tokens an answer must have to be no mere label.
OPENING_TOKENS: Final = 6
OPENING_SHARE: Final = 0.5
ANSWER_TOKENS: Final = 16
#: Few samples many times: passes over fewer samples than this.
FEW_SAMPLES: Final = 1_000
MANY_PASSES: Final = 10

# Mixture.
#: Total variation distance of domain shares before and after, steps on either side, samples needed on each.
MIXTURE_SHIFT: Final = 0.3
MIXTURE_WINDOW: Final = 24
MIXTURE_MIN_SAMPLES: Final = 16
#: Times the distance that samples of one and the same mixture show by chance.
MIXTURE_OVER_NOISE: Final = 3.0
#: Steps from the change to the first sign of trouble.
MIXTURE_LEAD: Final = 10
#: Where nobody planned the change, a rise of the loss level counts as trouble, too: robust σ and share of the level.
MIXTURE_RISE_SIGMA: Final = 4.0
MIXTURE_RISE_SHARE: Final = 0.05

# Packing.
#: Loss sums of the same documents apart and packed may differ by this share (rounding, other kernels).
PACKED_LOSS_WITHIN: Final = 0.01

#: Rows whose labels are the tokens of another row of their batch from which on that is no chance (labels-misaligned).
EXCHANGED_ROWS = 2
