"""The counterfactual engine: which named fault reproduces the observed number?

A computation is one reference function of a case and a specification. A fault edits the specification, never the
arithmetic. The engine tries the healthy specification, each single fault, and pairs of faults of different knobs, and
says which of them lie within what the job's own rounding allows, how likely that is by chance, and what is next to
them. Pure and deterministic: the perturbations that measure rounding come from a seeded generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import finding
from .fault import Fault, Observation, Spec, Status, Value, Verdict
from .rounding import (
    SIGMAS,
    UNIT_ROUNDOFF,
    Noise,
    as_scalar,
    meeting_keys,
    same_values,
    scalar_tolerance,
    tensor_z,
)

#: Random perturbations of the inputs that measure how much rounding can move a candidate.
DRAWS = 12
#: Expected matches by chance up to which a verdict may be confirmed, and up to which a single fault may be named.
CONFIRM_CHANCE, NAME_CHANCE = 1e-3, 1e-2
#: Distance in tolerances that the next candidate must keep.
RUNNER_UP = 3.0
#: Rows of a tensor on which all candidates are screened before the survivors are computed whole.
SCREEN_ROWS = 32


@dataclass(frozen=True)
class Match:
    """How a candidate relates to all observations: its distance in tolerances (≤ 1 fits) and each tolerance."""

    distance: float
    tolerances: tuple[float, ...]
    z: float


@dataclass(frozen=True)
class Class:
    """Candidates that give one value on this input: ``members`` are the fault sets of the smallest number of faults."""

    tier: int
    members: tuple[tuple[str, ...], ...]
    specs: tuple[Any, ...]
    values: tuple[Value, ...]


def explain(
    observations: Sequence[Observation], healthy: Sequence[Spec], faults: Sequence[Fault], seed: int = 0
) -> Verdict:
    """Say which of ``faults`` (none, one, or two of different knobs) reproduces all observations.

    Args:
        observations: at least one; a candidate must fit every one of them.
        healthy: the lawful specifications, the declared one first. Several where the job's own choice is unknown:
            each is healthy, and every fault is tried on each.
        faults: the catalogue.
        seed: of the perturbations.

    Raises:
        ValueError: no observation, no healthy specification, or an observed value that is not finite.
    """
    if not observations or not healthy:
        raise ValueError("the engine needs at least one observation and one healthy specification")
    if not all(np.isfinite(each.value).any() if each.is_tensor else np.isfinite(each.value) for each in observations):
        raise ValueError("an observed value is not finite")
    return _Search(tuple(observations), tuple(healthy), tuple(faults), seed).verdict()


class _Search:
    """One run of the engine; holds what its steps share."""

    def __init__(
        self, observations: tuple[Observation, ...], healthy: tuple[Any, ...], faults: tuple[Fault, ...], seed: int
    ) -> None:
        self.observations = observations
        self.healthy = healthy
        self.faults = tuple(each for each in faults if any(each.when(o.case) for o in observations))
        self.seed = seed
        self.tensors = any(each.is_tensor for each in observations)
        self._matches: dict[int, Match] = {}
        self._values: dict[Any, tuple[Value, ...]] = {}

    # -- candidates ----------------------------------------------------------------------------------------------

    def specs(self, tier: int) -> list[tuple[tuple[str, ...], Any]]:
        """(names, specification) of every candidate with ``tier`` faults, each specification once."""
        seen: set[Any] = set(self.healthy)
        found: list[tuple[tuple[str, ...], Any]] = []
        if tier == 0:
            return [((), spec) for spec in dict.fromkeys(self.healthy)]
        for base in self.healthy:
            for chosen in combinations(self.faults, tier):
                if len({each.knob for each in chosen}) < tier:
                    continue
                spec = base
                for fault in chosen:
                    edited = fault.edit(spec)
                    if edited == spec:
                        break
                    spec = edited
                else:
                    if spec not in seen:
                        seen.add(spec)
                        found.append((tuple(each.name for each in chosen), spec))
        return found

    def values(self, spec: Any, rows: bool = False) -> tuple[Value, ...]:
        """The candidate's exact value for each observation (on the screening rows of tensors only, where asked)."""
        if rows:
            return tuple(each.reference(each.case, spec, None, self._screen(each)) for each in self.observations)
        if spec not in self._values:
            self._values[spec] = tuple(each.reference(each.case, spec, None, None) for each in self.observations)
        return self._values[spec]

    def classes(self, tier: int, known: Sequence[Class]) -> list[Class]:
        """Candidates of a tier as classes of equal value, without those that equal a class of a smaller tier."""
        groups: list[tuple[tuple[Value, ...], list[tuple[str, ...]], list[Any]]] = []
        seen: dict[str, list[tuple[tuple[Value, ...], int | None]]] = {}
        for each in known:
            for key in meeting_keys(each.values):
                seen.setdefault(key, []).append((each.values, None))
        for names, spec in self.specs(tier):
            if self.tensors and tier and not self._survives(spec):
                continue
            values = self.values(spec)
            if not all(np.isfinite(value).any() for value in values):
                continue
            keys = meeting_keys(values)
            near = (each for key in keys for each in seen.get(key, ()))
            equal = next((group for value, group in near if same_values(values, value)), -1)
            if equal is None:
                continue  # of a smaller tier
            if equal < 0:
                for key in keys:
                    seen.setdefault(key, []).append((values, len(groups)))
                groups.append((values, [names], [spec]))
            elif names not in groups[equal][1]:
                groups[equal][1].append(names)
                groups[equal][2].append(spec)
        return [Class(tier, tuple(members), tuple(specs), values) for values, members, specs in groups]

    @cached_property
    def inert(self) -> tuple[str, ...]:
        """Applicable faults that leave the value of every lawful specification as it is."""
        names: list[str] = []
        bases = [(spec, self.values(spec)) for spec in self.healthy]
        for fault in self.faults:
            edits = [(fault.edit(spec), spec, values) for spec, values in bases]
            if all(same_values(values, self.values(edited)) for edited, spec, values in edits if edited != spec):
                names.append(fault.name)
        return tuple(names)

    def _screen(self, observation: Observation) -> NDArray[np.intp] | None:
        if not isinstance(observation.value, np.ndarray) or len(observation.value) <= SCREEN_ROWS:
            return None
        return np.unique(np.linspace(0, len(observation.value) - 1, SCREEN_ROWS).astype(np.intp))

    def _survives(self, spec: Any) -> bool:
        """Whether a candidate is near enough on the screening rows to be worth computing whole."""
        for observation, value in zip(self.observations, self.values(spec, rows=True), strict=True):
            if not isinstance(observation.value, np.ndarray):
                continue
            rows = self._screen(observation)
            seen = observation.value if rows is None else observation.value[rows]
            sigma = np.full_like(seen, 4.0 * observation.input_roundoff * float(np.sqrt(np.nanmean(seen**2))))
            if tensor_z(seen, np.asarray(value), sigma, observation.value_roundoff)[1] > 50.0:
                return False
        return True

    # -- fit -----------------------------------------------------------------------------------------------------

    def match(self, candidate: Class) -> Match:
        """Distance of a class from the observations, in tolerances."""
        key = id(candidate)
        if key not in self._matches:
            parts = [self._match_one(index, candidate.specs[0], value) for index, value in enumerate(candidate.values)]
            self._matches[key] = Match(
                distance=max(distance for distance, _, _ in parts),
                tolerances=tuple(tolerance for _, tolerance, _ in parts),
                z=max(z for _, _, z in parts),
            )
        return self._matches[key]

    def _match_one(self, index: int, spec: Any, value: Value) -> tuple[float, float, float]:
        """(distance in tolerances, tolerance, z for the ratio step) of one candidate at one observation."""
        observation = self.observations[index]
        if isinstance(observation.value, np.ndarray):
            sigma = self._sigma(observation, spec, value)
            worst, overall = tensor_z(
                observation.value, np.asarray(value), np.asarray(sigma), observation.value_roundoff
            )
            exact = observation.value_roundoff < UNIT_ROUNDOFF["float16"]
            row_limit, limit = (8.0, 2.5) if exact else (5.0, 1.5)
            spread = float(np.sqrt(np.nanmean(np.asarray(sigma) ** 2)))
            return max(worst / row_limit, overall / limit), limit * spread, overall
        observed, computed = float(observation.value), float(value)
        off = abs(observed - computed)
        near = scalar_tolerance(computed, 0.0, observation.value_roundoff, observation.decimals)
        # Rounding is measured only where it can decide: elsewhere the healthy candidate's stands in for it.
        usual, healthy = self._usual_sigma[index]
        reach = SIGMAS * 10.0 * usual * max(1.0, abs(computed) / max(abs(healthy), 1e-300))
        sigma = float(self._sigma(observation, spec, computed)) if off <= near + reach else usual
        tolerance = scalar_tolerance(computed, sigma, observation.value_roundoff, observation.decimals)
        return off / max(tolerance, 1e-300), tolerance, 0.0

    @cached_property
    def _usual_sigma(self) -> tuple[tuple[float, float], ...]:
        """(standard deviation, value) of the healthy candidate at each scalar observation."""

        def one(index: int, observation: Observation) -> tuple[float, float]:
            for spec in self.healthy:
                value = self.values(spec)[index]
                if not isinstance(value, np.ndarray) and np.isfinite(value):
                    return float(self._sigma(observation, spec, value)), float(value)
            return 0.0, 0.0

        return tuple(one(index, each) for index, each in enumerate(self.observations))

    def _sigma(self, observation: Observation, spec: Any, value: Value) -> Value:
        """Root mean square change of a candidate under random perturbations of its inputs."""
        total = np.zeros_like(np.asarray(value, dtype=np.float64))
        for draw in range(DRAWS):
            noise = Noise(self.seed, draw, observation.input_roundoff)
            total += (np.asarray(observation.reference(observation.case, spec, noise, None)) - value) ** 2
        sigma = np.sqrt(total / DRAWS)
        return sigma if isinstance(value, np.ndarray) else float(sigma)

    # -- verdict -------------------------------------------------------------------------------------------------

    def verdict(self) -> Verdict:
        """Healthy first, then singles, then pairs; the smallest tier that fits speaks."""
        known = self.classes(0, ())
        known += self.classes(1, known)
        # Scalars are cheap, and the nearest candidate of any tier counts; pairs of tensors only where nothing fits.
        if not self.tensors or not any(self.match(each).distance <= 1 for each in known):
            known += self.classes(2, known)
        fits = [each for each in known if self.match(each).distance <= 1]
        if self.tensors and fits:
            best = max(min(self.match(each).z for each in fits), 0.05)
            fits = [each for each in fits if self.match(each).z <= 1.5 * best]
        if fits:
            tier = min(each.tier for each in fits)
            fits = [each for each in fits if each.tier == tier]
        return self._judge(known, fits)

    def _judge(self, known: list[Class], fits: list[Class]) -> Verdict:
        named = tuple(dict.fromkeys(tuple(sorted(each.members)) for each in fits))
        others = [each for each in known if tuple(sorted(each.members)) not in named]
        runner = min(others, key=lambda each: self.match(each).distance, default=None)
        chance = self._chance(known, fits)
        reasons: list[str] = []
        status: Status = "undetermined"
        if fits and fits[0].tier == 0:
            status = "healthy"
        elif not fits:
            reasons.append("no named fault reproduces the number")
        elif len(named) > 1:
            reasons.append("several faults reproduce the number and this evidence cannot tell them apart")
        else:
            reasons = self._doubts(fits[0], runner, chance, known)
            limit = NAME_CHANCE if fits[0].tier == 1 and not self._coarse else CONFIRM_CHANCE
            status = "likely" if chance <= limit else "undetermined"
            status = status if reasons else "confirmed"
        return Verdict(
            status=status,
            classes=named,
            z=min((self.match(each).distance for each in fits), default=float("nan")),
            chance=chance,
            runner_up=self._row(runner, fits) if runner is not None else None,
            inert=self.inert,
            reasons=tuple(reasons),
            table=self._table(known, fits, named, runner, chance),
        )

    def _chance(self, known: list[Class], fits: list[Class]) -> float:
        """M · Π tolerance / (0.1·|observed|): how many candidates of these tiers would match by chance."""
        tier = fits[0].tier if fits else 2
        inside = sum(
            all(
                abs(float(np.nanmean(value)) - float(np.nanmean(o.value))) <= 0.1 * abs(float(np.nanmean(o.value)))
                for o, value in zip(self.observations, each.values, strict=True)
            )
            for each in known
            if each.tier <= tier
        )
        expected = float(max(inside, 1))
        tolerances = self.match(fits[0]).tolerances if fits else self.match(known[0]).tolerances if known else ()
        for observation, tolerance in zip(self.observations, tolerances, strict=False):
            size = float(np.sqrt(np.nanmean(np.square(observation.value))))
            share = min(1.0, tolerance / max(0.1 * size, 1e-300))
            # Rows of a tensor are nearly independent witnesses; eight of them are as many as we count.
            rows = min(len(observation.value), 8) if isinstance(observation.value, np.ndarray) else 1
            expected *= share**rows
        return expected

    @cached_property
    def _coarse(self) -> bool:
        """Whether every number was itself computed in half precision: two or three digits of it are real."""
        return not self.tensors and all(o.value_roundoff >= UNIT_ROUNDOFF["float16"] for o in self.observations)

    def _doubts(self, fit: Class, runner: Class | None, chance: float, known: list[Class]) -> list[str]:
        """Why a single fitting class is not confirmed; empty where everything holds."""
        doubts: list[str] = []
        printed = [each.decimals for each in self.observations if not each.is_tensor]
        if not self.tensors and all(each is not None and each <= 2 for each in printed):
            doubts.append("two printed decimals or fewer never confirm")
        if self._coarse:
            doubts.append("numbers computed in half precision never confirm")
        if chance > CONFIRM_CHANCE:
            doubts.append(f"{chance:.2g} candidates would match by chance ({CONFIRM_CHANCE:g} allowed)")
        if runner is not None and self.match(runner).distance < RUNNER_UP:
            doubts.append(f"the next candidate is only {self.match(runner).distance:.1f} tolerances away")
        if fit.tier == 2:
            if not self.tensors and len(printed) == 1 and printed[0] is not None and printed[0] <= 4:
                doubts.append("a pair of faults is not confirmed by one number of four decimals")
            if not self._parts_move(fit, known):
                doubts.append("one of the two faults alone hardly moves the number")
        return doubts

    def _parts_move(self, fit: Class, known: list[Class]) -> bool:
        """Whether each fault of a pair, alone, moves some observation by more than three tolerances from healthy."""
        base = next((each for each in known if each.tier == 0), None)
        alone = {member[0]: each for each in known if each.tier == 1 for member in each.members}
        if base is None:
            return False
        tolerances = self.match(fit).tolerances
        for name in fit.members[0]:
            part = alone.get(name)
            if part is None:  # screened out for being far from the observed tensor, or inert
                if not self.tensors or name in self.inert:
                    return False
                continue
            moved = (
                float(np.sqrt(np.nanmean(np.square(np.asarray(a) - np.asarray(b))))) / max(tolerance, 1e-300)
                for a, b, tolerance in zip(part.values, base.values, tolerances, strict=True)
            )
            if max(moved) <= RUNNER_UP:
                return False
        return True

    # -- presentation --------------------------------------------------------------------------------------------

    @cached_property
    def _shown(self) -> int:
        """The observation that the healthy reference misses most: there the candidates differ most."""

        def miss(index: int) -> float:
            value = self.values(self.healthy[0])[index]
            if not np.isfinite(value).any():
                return 0.0
            return self._match_one(index, self.healthy[0], value)[0]

        return max(range(len(self.observations)), key=miss)

    def _row(self, candidate: Class, fits: list[Class]) -> finding.Candidate:
        value = as_scalar(candidate.values[self._shown])
        return finding.Candidate(
            faults=candidate.members[0],
            value=value,
            off_by=abs(value - as_scalar(self.observations[self._shown].value)),
            fits=candidate in fits,
        )

    def _table(
        self,
        known: list[Class],
        fits: list[Class],
        named: tuple[tuple[tuple[str, ...], ...], ...],
        runner: Class | None,
        chance: float,
    ) -> finding.Counterfactual:
        healthy = self.values(self.healthy[0])[self._shown]
        nearest = sorted((each for each in known if each not in fits), key=lambda each: self.match(each).distance)
        shown = [*fits, *nearest[:8]]
        tolerances = self.match(shown[0]).tolerances if shown else ()
        return finding.Counterfactual(
            observed=as_scalar(self.observations[self._shown].value),
            tolerance=tolerances[self._shown] if tolerances else float("nan"),
            healthy=as_scalar(healthy),
            candidates=tuple(self._row(each, fits) for each in shown),
            classes=tuple(tuple(" + ".join(names) for names in members) for members in named),
            runner_up=self._row(runner, fits) if runner is not None else None,
            chance=chance,
            inert=self.inert,
        )
