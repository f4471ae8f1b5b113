"""Every action of the console in one table: keys, palette, help, footer and the README are made from it.

A key can be changed by the action's id in ``keys.toml`` (``llmconsole doctor`` says where): ``"app.quit" = "ctrl+q"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.binding import Binding


@dataclass(frozen=True)
class Action:
    """One thing a user can do.

    Attributes:
        id: stable name, by which a key is re-mapped.
        scope: screen it works on: ``app`` (everywhere), ``home``, ``capsule``, ``cases`` …
        keys: default keys, comma separated, in Textual's names.
        label: one or two words for the footer; empty keeps it out of there.
        description: one sentence for help and palette.
        method: the Textual action it runs, on the screen or on the app (``app.`` prefix).
    """

    id: str
    scope: str
    keys: str
    label: str
    description: str
    method: str


#: What the views are for, in the order of their keys.
_VIEWS = (
    "Overview: ladder and findings",
    "Timelines: series over the steps",
    "Layers: statistics of each tensor",
    "Batch: tokens, labels, losses",
    "Memory: what each phase holds, and who held the peak",
    "Ranks: who did which collective",
    "Latency: where the time of requests goes",
    "Notebook: hypotheses, what tested them, the clock",
    "Gate: six items that prove the fix",
)

#: Keys avoided on purpose: Alt, and ctrl+a b s q h i j m, which terminals, tmux and screen take for themselves.
ACTIONS: tuple[Action, ...] = (
    Action("app.help", "app", "question_mark", "help", "What the keys do here", "app.help"),
    Action("app.palette", "app", "colon", "palette", "Find an action by name", "app.command_palette"),
    Action("app.cases", "app", "c", "cases", "Search the case log", "app.cases"),
    Action("app.mouse", "app", "percent_sign", "", "Mouse off or on, to select text with the terminal", "app.mouse"),
    Action("app.theme", "app", "T", "", "Next theme; one of them uses the terminal's own colours", "app.next_theme"),
    Action("app.suspend", "app", "ctrl+z", "", "Into the background (fg brings it back)", "app.suspend_process"),
    Action("app.quit", "app", "q", "quit", "Leave the console", "app.quit"),
    Action("home.open", "home", "enter", "open", "Open the capsule", "open"),
    Action("home.filter", "home", "slash", "filter", "Show only capsules that hold these words", "filter"),
    Action(
        "home.resolve", "home", "r", "resolve", "Make a case of this incident, shown first, then committed", "resolve"
    ),
    Action("home.export", "home", "e", "", "Write this capsule's report to a file: text, SVG or HTML", "export"),
    Action("home.import", "home", "i", "", "Make a capsule of a raw file, which a notebook and a case need", "import"),
    Action("home.pause", "home", "space", "", "Hold the view still; recording and reading go on", "pause"),
    Action("capsule.close", "capsule", "escape", "back", "Back to the list", "close"),
    Action(
        "capsule.resolve",
        "capsule",
        "r",
        "resolve",
        "Make a case of this incident, shown first, then committed",
        "resolve",
    ),
    Action("capsule.next", "capsule", "right_square_bracket", "", "Next capsule of the list", "neighbour(1)"),
    Action("capsule.previous", "capsule", "left_square_bracket", "", "Previous capsule of the list", "neighbour(-1)"),
    Action("capsule.export", "capsule", "e", "", "Write this capsule's report to a file: text, SVG or HTML", "export"),
    Action(
        "capsule.import", "capsule", "i", "", "Make a capsule of a raw file, which a notebook and a case need", "import"
    ),
    *(
        Action(f"capsule.view-{number}", "capsule", str(number), "", words, f"view({number})")
        for number, words in enumerate(_VIEWS, start=1)
    ),
    Action("timelines.right", "timelines", "right,l", "", "Move the step cursor to the right", "cursor(1)"),
    Action("timelines.left", "timelines", "left,h", "step", "Move the step cursor to the left", "cursor(-1)"),
    Action("timelines.next-event", "timelines", "n", "event", "Next event", "event(1)"),
    Action("timelines.previous-event", "timelines", "N", "", "Previous event", "event(-1)"),
    Action("timelines.in", "timelines", "plus,equals_sign", "zoom", "Zoom in around the cursor", "zoom(0.5)"),
    Action("timelines.out", "timelines", "minus", "", "Zoom out", "zoom(2.0)"),
    Action("timelines.whole", "timelines", "0", "", "All steps, without the cursor", "whole"),
    Action("timelines.log", "timelines", "y", "log", "Linear or logarithmic value axis", "log"),
    Action("timelines.panel", "timelines", "tab", "panel", "Next panel: add and full act on it", "choose(1)"),
    Action("timelines.panel-before", "timelines", "shift+tab", "", "Previous panel", "choose(-1)"),
    Action("timelines.full", "timelines", "z", "", "The chosen panel alone, or all of them", "full"),
    Action("timelines.overlay", "timelines", "o", "overlay", "Lay another run over, or take it away", "overlay"),
    Action("timelines.add", "timelines", "a", "add", "Draw another series in the chosen panel, or take it out", "add"),
    Action("timelines.down", "timelines", "down,j", "", "Next series", "scroll_series(1)"),
    Action("timelines.up", "timelines", "up,k", "", "Previous series", "scroll_series(-1)"),
    Action("overview.open", "overview", "enter", "open", "All of the finding: numbers, candidates, advice", "open"),
    Action("overview.back", "overview", "escape", "", "Back to the findings", "back"),
    Action("overview.documentation", "overview", "d", "rule", "What the rule checks and how it decides", "document"),
    Action("overview.copy", "overview", "C", "copy", "Copy the finding as text, to the clipboard and a file", "copy"),
    Action("layers.forward", "layers", "f", "forward", "Forward pass, in execution order", "show('forward')"),
    Action("layers.backward", "layers", "b", "backward", "Gradients, in autograd order", "show('backward')"),
    Action("layers.parameters", "layers", "p", "params", "Parameters", "show('parameters')"),
    Action("layers.updates", "layers", "u", "updates", "What the optimizer added, and its moments", "show('updates')"),
    Action("layers.left", "layers", "left,h", "step", "Previous recorded step", "step(-1)"),
    Action("layers.right", "layers", "right,l", "", "Next recorded step", "step(1)"),
    Action("layers.full", "layers", "n", "full", "Next step with full statistics", "full(1)"),
    Action("layers.full-before", "layers", "N", "", "Previous step with full statistics", "full(-1)"),
    Action("layers.bad", "layers", "w", "first bad", "Go to the first bad tensor", "bad"),
    Action("layers.micro", "layers", "m", "", "Next micro-batch", "micro"),
    Action("layers.rank", "layers", "R", "", "Next rank", "rank"),
    Action("batch.down", "batch", "down,j", "sample", "Next sample", "sample(1)"),
    Action("batch.up", "batch", "up,k", "", "Previous sample", "sample(-1)"),
    Action("batch.along", "batch", "full_stop,pagedown", "tokens", "Further along the tokens", "along(1)"),
    Action("batch.back", "batch", "comma,pageup", "", "Back along the tokens", "along(-1)"),
    Action("batch.start", "batch", "home", "", "First token", "edge(0)"),
    Action("batch.end", "batch", "end", "", "Last token", "edge(1)"),
    Action("batch.worst", "batch", "w", "worst", "Go to the worst token; again: to the next worst", "worst"),
    Action("batch.extra", "batch", "x", "fault", "What the named fault counts in addition", "extra"),
    Action("batch.left", "batch", "left,h", "step", "Previous captured batch", "step(-1)"),
    Action("batch.right", "batch", "right,l", "", "Next captured batch", "step(1)"),
    Action("memory.right", "memory", "right,l", "", "Next step with a ledger", "step(1)"),
    Action("memory.left", "memory", "left,h", "step", "Previous step with a ledger", "step(-1)"),
    Action("memory.peak", "memory", "w", "peak", "The step at which most was allocated", "peak"),
    Action("memory.down", "memory", "down,j", "stack", "Next stack that held memory at the peak", "stack(1)"),
    Action("memory.up", "memory", "up,k", "", "Previous stack", "stack(-1)"),
    Action("memory.rank", "memory", "R", "rank", "Next rank", "rank"),
    Action("ranks.left", "ranks", "left,h", "", "Earlier collectives", "along(-1)"),
    Action("ranks.right", "ranks", "right,l", "along", "Later collectives", "along(1)"),
    Action("ranks.page-left", "ranks", "comma", "", "A screen of collectives earlier", "page(-1)"),
    Action("ranks.page-right", "ranks", "full_stop", "", "A screen of collectives later", "page(1)"),
    Action("ranks.up", "ranks", "up,k", "", "Previous rank", "rank(-1)"),
    Action("ranks.down", "ranks", "down,j", "rank", "Next rank", "rank(1)"),
    Action("ranks.first", "ranks", "w", "first difference", "Go to the first collective that ranks differ in", "first"),
    Action("ranks.group", "ranks", "p", "group", "Next process group", "group"),
    Action("latency.down", "latency", "down,j", "", "Further down the slices", "scroll(1)"),
    Action("latency.up", "latency", "up,k", "slices", "Back up the slices", "scroll(-1)"),
    Action("latency.measure", "latency", "t", "measure", "Time to first token, or the whole request", "measure"),
    Action("notebook.down", "notebook", "down,j", "", "Next hypothesis", "choose(1)"),
    Action("notebook.up", "notebook", "up,k", "choose", "Previous hypothesis", "choose(-1)"),
    Action("notebook.start", "notebook", "s", "start", "Start the clock; the rules suggest hypotheses", "start"),
    Action("notebook.hypothesis", "notebook", "h", "hypothesis", "Write down what would explain it", "hypothesis"),
    Action("notebook.test", "notebook", "t", "test", "Run the rule of the hypothesis, or write a test down", "test"),
    Action("notebook.experiment", "notebook", "x", "result", "Write down what a test showed", "experiment"),
    Action("notebook.note", "notebook", "n", "note", "Write down a line", "note"),
    Action("gate.down", "gate", "down,j", "", "Next item", "choose(1)"),
    Action("gate.up", "gate", "up,k", "item", "Previous item", "choose(-1)"),
    Action("gate.init", "gate", "i", "write file", "Write the gate's file with what card and git know", "init"),
    Action("gate.run", "gate", "t", "run", "Run the six items; commits card, file and record if it passes", "run"),
    Action("gate.stop", "gate", "S", "stop", "Stop the run; nothing of it stays", "stop"),
    Action("cases.back", "cases", "escape", "back", "Back to where you came from", "back"),
    Action("cases.search", "cases", "slash", "search", "Back to the search box", "search"),
    Action("cases.down", "cases", "down", "", "Next case", "move(1)"),
    Action("cases.up", "cases", "up", "", "Previous case", "move(-1)"),
    Action("cases.page-down", "cases", "pagedown", "", "Scroll the card down", "page(1)"),
    Action("cases.page-up", "cases", "pageup", "", "Scroll the card up", "page(-1)"),
    Action("cases.open", "cases", "enter", "occurrences", "Occurrences, gate and commits of the case", "open"),
    Action("resolve.back", "resolve", "escape", "back", "Back; asks before anything typed is lost", "back"),
    Action("resolve.next", "resolve", "enter", "next field", "Next field; on the button: review", "next"),
    Action("resolve.down", "resolve", "down", "", "Next field", "field(1)"),
    Action("resolve.up", "resolve", "up", "", "Previous field", "field(-1)"),
    Action("resolve.review", "resolve", "f2", "review", "Show file, diff and message of the commit", "review"),
    Action("review.commit", "review", "y", "commit", "Commit exactly what is shown", "commit"),
    Action(
        "review.back", "review", "escape", "back", "Back to the form; after the commit to where it was opened", "back"
    ),
)


def bindings(scope: str) -> list[Binding]:
    """Textual bindings of one scope; ids let a key map replace the keys."""
    from textual.binding import Binding

    return [
        Binding(each.keys, each.method, each.label or each.description, show=bool(each.label), id=each.id)
        for each in ACTIONS
        if each.scope == scope and each.keys
    ]


def load_keymap(path: Path) -> tuple[dict[str, str], list[str]]:
    """Read a key map: action id → keys.

    Returns:
        The usable entries, and one line for each that is not: a wrong key map must not keep anyone from the console.
    """
    if not path.exists():
        return {}, []
    import tomllib  # most have no such file, and need none of it for the first paint

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return {}, [f"{path.name}: not read ({error}); the default keys are in use"]
    known = {each.id for each in ACTIONS}
    keymap: dict[str, str] = {}
    warnings: list[str] = []
    for name, keys in _flatten(table):
        if name not in known:
            warnings.append(f"{path.name}: no action {name!r}; ? lists them")
        elif not isinstance(keys, str) or not keys:
            warnings.append(f"{path.name}: {name} needs a key in quotes")
        else:
            keymap[name] = keys
    return keymap, warnings


def _flatten(table: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """TOML reads ``app.help = "f1"`` as a table in a table; both spellings mean the action ``app.help``."""
    flat: list[tuple[str, object]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        flat += _flatten(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return flat
