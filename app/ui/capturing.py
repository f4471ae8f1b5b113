"""What to do so that a piece of evidence is captured: one line each, by the names that rules use."""

from __future__ import annotations

#: Longest prefix first decides; ``|`` in a need means either.
_HOW: tuple[tuple[str, str], ...] = (
    ("batches.roles", "give rec.step(batch=…) a `roles` array: 0 padding, 1 system, 2 user, 3 assistant, 4 tool"),
    ("batches.token_loss", 'Recorder("runs", model=model, optimizer=optimizer); rec.step(batch=batch)'),
    ("batches", "with rec.step(batch=batch): one call a micro-batch"),
    ("scalars", 'Recorder("runs", model=model, optimizer=optimizer), or step.log(name=value)'),
    ("stats", 'Recorder("runs", model=model, every=50)'),
    ("manifest", "Recorder(…, manifest={…}) with this field"),
    ("records.samples", "with rec.step(batch=batch, sample_ids=ids)"),
    ("records.collectives", "record every rank (one Recorder a rank)"),
    ("records.ranks", "record every rank (one Recorder a rank)"),
    ("records.requests", "CapsuleWriter.records('requests', …) from the server's request log"),
    ("records.memory", "CapsuleWriter.records('memory', …), one a phase"),
    ("records", "CapsuleWriter.records('NAME', …); capsules/README.md has the fields"),
    ("tensors", "CapsuleWriter.tensor('group/name', array, step=…)"),
)


def how_to_capture(needs: tuple[str, ...] | list[str]) -> str:
    """One line for the evidence that is missing, the most wanted first: ``need (how)``."""
    if not needs:
        return ""
    need = needs[0]
    alternatives = need.split("|")
    how = next((words for prefix, words in _HOW if alternatives[0].startswith(prefix)), "")
    names = " or ".join(alternatives)
    return f"{names}: {how}" if how else names


def what_to_capture(lacking: tuple[str, ...] | list[str]) -> str:
    """One line for what rules lack, the most wanted first; reasons in words stand as they are."""
    needs = [each for each in lacking if " " not in each]
    return f"capture {how_to_capture(needs)}" if needs else "; ".join(lacking[:1])
