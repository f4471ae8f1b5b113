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
