"""Numbers by which ``diff`` tells a step from noise, and rounding from a difference."""

from __future__ import annotations

#: A difference is a jump where it is so many times what was visible before. Rounding grows by about a factor of two a
#: step at most, so a wider logging interval allows for more.
JUMP = 20.0
GROWTH_A_STEP = 2.0
MOST_HIDDEN_STEPS = 10
#: Points that a jump over earlier noise must last.
JUMP_LASTS = 3
#: Relative rounding of a value whose dtype is not known: what float32 leaves after a few operations.
ROUNDING = 2.0**-20
#: Rounding starts below this share of the curves' own noise from step to step; other data is of its size.
SMALL_AGAINST_NOISE = 0.1
DATA_AGAINST_NOISE = (0.3, 10.0)
#: Relative difference below which a first difference may be rounding at all, and below which it is in any case.
LARGEST_ROUNDING = 1e-2
SURE_ROUNDING = 1e-5
#: … and where only a few points were equal before.
SMALL_START = 1e-3
#: Averages of the finer log are compared where they are nearer to the coarser one by this factor.
NEARER_AS_MEANS = 0.25
#: The rarer sign of the differences must make up this share before they count as scatter.
MIXED_SIGNS = 0.15
#: Points before noise can be measured, and points of the beginning that are looked at.
NOISE_POINTS = 8
FIRST_POINTS = 5
#: Differences that grow so much from the first points to the last ones are said to grow.
GROWS = 10.0
#: A ratio is constant where the central 80 % of it stay within the first share, and it is off 1 by the second; a
#: tighter one may be nearer to 1.
RATIO_SPREAD = (0.05, 0.25)
TIGHT_RATIO_SPREAD = (0.002, 0.02)
RATIO_POINTS = 3

#: Machine epsilon by dtype, and how many of it two results of one computation may differ by in their norm.
EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}
TENSOR_EPSILONS = {"float64": 64.0, "float32": 64.0, "float16": 4.0, "bfloat16": 2.0}
#: The same for whatever a job of low precision computes, and by how much it widens where the two jobs' dtypes differ.
COARSE_EPSILONS = 2.0
OTHER_DTYPE = 4.0
