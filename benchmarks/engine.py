"""Rates of the counterfactual engine over random loss incidents, and what a verdict costs.

Each incident comes from a torch path written apart from the reference (``tests/analyzers/sweep``), goes through a
capsule on disk, and is judged. Faults that change nothing on their input are counted apart; a set of equivalent
faults that holds the truth counts as right.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmconsole.analyzers.objective.loss_verdict import loss_verdict
from llmconsole.capsules import Capsule, CapsuleWriter

from tests.analyzers.sweep import incidents, rates

#: Modes that the targets speak of; the others are shown with a third of the trials.
TARGETS = (
    *(rates.FP32_FOUR, rates.FP32_TWO_STEPS, rates.BF16_LOGITS, rates.BF16_LOGITS_TWO, rates.BF16_STORED_THREE),
    rates.BF16_LOSS_FIVE,
)


def table(seeds: int) -> None:
    """One line a mode: singles and pairs named, false names, healthy alarms, unknown causes named."""
    unknown = [f"unknown:{name}" for name in incidents.UNKNOWN]
    print(
        f"{len(incidents.FAULTS)} faults, {len(incidents.PAIRS)} pairs, {len(unknown)} causes outside the catalogue; "
        "of trials that change the number, the equivalent set exact"
    )
    heads = ("singles", "confirmed", "pairs", "confirmed", "misnamed", "false alarms", "unknown named", "confirmed")
    print(f"{'':40}" + "".join(f"{head:>16}" for head in heads) + f"{'ms':>7}")
    for mode in rates.MODES:
        count = seeds if mode in TARGETS else max(1, seeds // 3)
        start = time.perf_counter()
        singles = rates.run(mode, list(incidents.FAULTS), range(count))
        pairs = rates.run(mode, list(incidents.PAIRS), range(max(1, count // 3)))
        healthy = rates.run(mode, ["healthy"] * HEALTHY, range(count))
        others = rates.run(mode, unknown, range(max(1, count // 3)))
        total = sum(each.said.total() for each in (singles, pairs, healthy, others))
        cells: list[str] = []
        for each in (singles, pairs):
            known, confirmed = each.count("fault:"), each.count("fault:confirmed")
            cells += [share(confirmed + each.count("fault:likely"), known), share(confirmed, known)]
        wrong = singles.count("fault:misnamed") + pairs.count("fault:misnamed")
        cells.append(share(wrong, singles.count("fault:") + pairs.count("fault:")))
        cells.append(share(healthy.count("healthy:false-alarm"), healthy.count("healthy:")))
        cells.append(share(others.count("unknown:named"), others.count("unknown:")))
        cells.append(share(others.count("unknown:named-confirmed"), others.count("unknown:")))
        cost = (time.perf_counter() - start) / total
        print(f"{mode.name:40}" + "".join(f"{cell:>16}" for cell in cells) + f"{cost * 1e3:7.0f}", flush=True)
    for mode in (rates.FP32_TWO_STEPS, rates.BF16_LOGITS_TWO, rates.BF16_LOSS_FIVE):
        said = rates.run(mode, [*incidents.FAULTS, *incidents.PAIRS], range(seeds), without_truth=True)
        confirmed, likely = said.count("unknown:named-confirmed"), said.count("unknown:named-likely")
        print(
            f"truth taken out of the catalogue, {mode.name}: confirmed {confirmed}, likely {likely} "
            f"of {said.count('unknown:')}",
            flush=True,
        )


def cost() -> None:
    """One verdict on logits of 64 MB (the largest a recorder keeps), and on the compact form of the same batch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32000, (1, 512), generator=generator)
    logits = torch.randn(1, 512, 32000, generator=generator)
    loss = float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("logits [1, 512, 32000]", "log-sum-exp and target logits"):
            path = Path(folder) / f"{len(name)}.capsule"
            with CapsuleWriter(path, title=name, phase="training", manifest={}) as writer:
                scores = {"logits": logits} if name.startswith("logits") else rates.compacted(logits, ids)
                writer.batch(step=0, rank=0, input_ids=ids, labels=ids, reported_loss=loss, **scores)
            start = time.perf_counter()
            verdict = loss_verdict(Capsule.open(path))
            assert verdict is not None
            print(f"{name:32} {verdict[0].status:10} {(time.perf_counter() - start) * 1e3:6.0f} ms")


def share(part: int, whole: int) -> str:
    """A rate with the number of trials behind it."""
    return f"{100 * part / whole:.1f} % / {whole}" if whole else "–"


#: Healthy steps a seed.
HEALTHY = 20


def main(seeds: int = 4) -> int:
    """Print the tables."""
    torch.set_num_threads(1)
    table(seeds)
    cost()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    raise SystemExit(main(parser.parse_args().seeds))
