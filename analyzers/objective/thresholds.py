"""Every threshold of the objective rules, in one place; each appears in a finding's evidence as ``expected``."""

from __future__ import annotations

from typing import Final

# Terms beside the cross-entropy.
#: Strengths that papers and libraries use.
USUAL_SMOOTHING: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
USUAL_Z: Final = (1e-5, 2e-5, 1e-4, 2e-4, 1e-3, 1e-2)
#: Expected number of them that would give the number by chance, up to which one is suggested.
TERM_CHANCE: Final = 0.1
#: A loss above the declared one by up to this share in every window may hold a further term that is meant.
TERM_SHARE: Final = 0.25
#: Share of the loss up to which an undeclared reduction is a remark.
SMALL: Final = 0.01

# The level of the loss against ln V.
#: objective/uniform-guess: share of ln V, share of the run, steps.
UNIFORM_WITHIN: Final = 0.02
UNIFORM_SHARE: Final = 0.8
UNIFORM_STEPS: Final = 50
#: objective/initial-loss: nats between the first loss and ln V.
INITIAL_WITHIN: Final = 0.5

# The scale of loss and gradient.
#: How near the first loss must be to a multiple of ln V, relative to that multiple: untrained logits add a little and
#: take almost nothing away.
FACTOR_BELOW: Final = 0.02
FACTOR_ABOVE: Final = 0.03
#: Two gradient norms (or losses) of one step: their ratio is a whole number to within this share. Losses of the same
#: samples in other micro-batches differ by more, where the number is one that is declared.
NORM_RATIO: Final = 1e-3
LOSS_RATIO: Final = 0.02
#: Evaluations beside which the training loss must stand at the same multiple, how near to it each, and the fewest.
EVAL_RATIO: Final = 0.1
EVAL_POINTS: Final = 2

# Supervision.
#: Share of rows without a supervised token from which it is more than a remark.
MASKED_ROWS: Final = 0.5

# A hidden loss.
#: Points in a row without a finite gradient norm from which a missing loss is an incident.
HIDDEN_POINTS: Final = 2
#: How near a ratio of two losses must be to what the filter of a trainer makes of a window that turned NaN inside.
FILTER_RATIO: Final = 0.1

# Memorised, and the run on one batch.
#: Nats a token below which a model recites free text, and below which it does by heart.
RECITES: Final = 0.2
BY_HEART: Final = 0.1
#: Passes over the data, and samples up to which a set is small.
MANY_EPOCHS: Final = 4.0
FEW_SAMPLES: Final = 10_000
#: An evaluation within this multiple (plus ``RECITES``) of the training loss shows that it generalises.
GENERALISES: Final = 2.0
#: Share of answers that begin alike, and share of distinct four-token sequences below which variety has collapsed.
ALIKE_OPENINGS: Final = 0.5
DISTINCT: Final = 0.3
#: A run on one batch: steps before it may be judged, the floor in nats above which it has not arrived, and the share
#: by which the second half of the plateau may still fall.
OVERFIT_STEPS: Final = 50
FLOOR: Final = 0.05
STILL_FALLING: Final = 0.1
#: How near the floor must be to the entropy of contradicting labels.
ENTROPY_WITHIN: Final = 0.1

# Vocabulary.
#: Norm of an embedding row, relative to the median row, below which it was never trained.
UNTRAINED_ROW: Final = 0.1

# Slices.
#: Rise of a part as a share of its loss that is more than the swing of a checkpoint.
SLICE_RISE: Final = 0.03
#: Fall of the whole as a share of its loss, where the samples are the same.
WHOLE_FALL: Final = 0.01
#: Probability with which noise alone may show such a rise in any part at any point; of scores in any slice.
SLICE_CHANCE: Final = 0.01
SLICE_SCORE_CHANCE: Final = 0.05
#: Fewest samples of a part on each side: the same ones twice, and different ones.
SLICE_PAIRS: Final = 5
SLICE_SAMPLES: Final = 12
#: Evaluations up to which each stands for itself; stretches that more of them, or training, are cut to; parts.
SLICE_POINTS: Final = 5
SLICE_BLOCKS: Final = 4
MOST_SLICES: Final = 64
#: A domain is absent where chance would leave it out with at most this probability.
ABSENT_CHANCE: Final = 0.01
