"""Every rule is documented, shown firing, shown quiet, and asks for evidence that exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from llmconsole.analyzers.registry import HEADINGS, Rule, all_rules, plugin_warnings, rule
from llmconsole.analyzers.stages import STAGES
from llmconsole.capsules.batches import BATCH_ARRAYS
from llmconsole.capsules.manifest import Manifest
from llmconsole.capsules.streams import STREAMS
from llmconsole.capsules.tables import Role

RULES = all_rules()
SCALARS = {
    *("loss", "eval_loss", "grad_norm", "grad_norm_clipped", "grad_norm_local", "grad_norm_reduced", "update_norm"),
    *("param_norm", "learning_rate", "weight_decay", "loss_scale", "overflow", "tokens", "step_time", "data_time"),
    *("memory_allocated", "memory_reserved", "memory_peak", "memory_device_used", "alloc_retries", "throughput"),
    *("gpu_utilization", "gpu_power", "gpu_temperature", "communication_time"),
    *("estimated_throughput", "round_trip_time"),
}
TENSOR_GROUPS = {
    *("reference", "observed", "attention", "norm", "decode", "weights", "optimizer", "adapter", "embedding"),
    *("diffusion", "media", "retrieval", "allocator"),
}
BATCH_ATTRIBUTES = {"reported_loss", "label_layout", "keys", "loss_dtype", "logits_dtype", "sample_ids"}
#: Rules that people rely on by name; one that vanishes is a decision, not an accident.
REQUIRED = {
    "capsule/damaged",
    "capsule/not-replayable",
    "capsule/nothing-logged",
    "data/attention-mask-mismatch",
    "data/bos-count",
    "data/duplicate-batch",
    "data/labels-misaligned",
    "data/length-outlier",
    "data/lengths",
    "data/low-diversity",
    "data/missing-field",
    "data/mixture-shift",
    "data/nonfinite-input",
    "data/packing-contamination",
    "data/pad-is-eos",
    "data/poison-sample",
    "data/split-leak",
    "data/template-not-found",
    "data/token-out-of-vocabulary",
    "data/truncation",
    "objective/all-masked",
    "objective/document-boundary-in-loss",
    "objective/ignore-index-missing",
    "objective/initial-loss",
    "objective/labels-not-shifted",
    "objective/labels-shifted-twice",
    "objective/logits-nonfinite",
    "objective/loss-hidden",
    "objective/memorised",
    "objective/pad-in-loss",
    "objective/prompt-in-loss",
    "objective/reduction",
    "objective/single-batch-floor",
    "objective/slice-regression",
    "objective/template-drift",
    "objective/tool-in-loss",
    "objective/tying-broken",
    "objective/unexplained-loss",
    "objective/uniform-guess",
    "objective/vocabulary-mismatch",
    "numerics/capability-drop",
    "numerics/eval-mode",
    "numerics/eval-padding",
    "numerics/eval-preprocessing",
    "numerics/first-nonfinite",
    "numerics/fp16-overflow",
    "numerics/gradient-explosion",
    "numerics/gradient-vanishing",
    "numerics/gradients-lost",
    "numerics/learning-rate",
    "numerics/loss-nonfinite",
    "numerics/loss-spike",
    "numerics/low-precision-op",
    "numerics/no-control-set",
    "numerics/no-convergence",
    "numerics/not-reported",
    "numerics/outlier-growth",
    "numerics/overfitting",
    "numerics/underflow",
    "optimizer/adapter-merged-twice",
    "optimizer/decay-on-norm-or-bias",
    "optimizer/frozen-not-frozen",
    "optimizer/gradient-chain-cut",
    "optimizer/gradients-not-zeroed",
    "optimizer/no-master-weights",
    "optimizer/not-owned",
    "optimizer/order",
    "optimizer/overflow-step-applied",
    "optimizer/recompute-rng",
    "optimizer/state-dtype",
    "optimizer/state-not-restored",
    "optimizer/step-mismatch",
    "optimizer/update-ratio",
    "distributed/duplicate-data",
    "distributed/gradient-scale",
    "distributed/rank-zero-work-everywhere",
    "distributed/replicas-diverged",
    "distributed/scaling",
    "distributed/straggler",
    "distributed/uneven-steps",
    "distributed/unwaited-buffer",
    "memory/allocator-thrash",
    "memory/capacity",
    "memory/serving-prefix-references",
    "memory/serving-pages",
    "memory/serving-output-limit",
    "memory/serving-cancelled",
    "memory/serving-admission",
    "memory/long-tail",
    "memory/ledger",
    "memory/eval-graph",
    "memory/checkpointing-with-cache",
    "memory/fragmentation",
    "memory/leak",
    "memory/logged-tensors",
    "memory/other-process",
    "runtime/job-failed",
    "distributed/collective-mismatch",
    "distributed/coverage",
    "distributed/group-order",
    "distributed/missing-rank",
    "distributed/rank-conditional",
    "distributed/rank-died-first",
    "distributed/timeout-raised",
}


def _words(tree: ast.Module) -> dict[str, str]:
    """Names that a module gives to words, one at a time or several in a line."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                names, values = (target.elts, node.value.elts) if several else ([target], [node.value])
                for name, value in zip(names, values, strict=True):
                    if isinstance(name, ast.Name) and isinstance(value, ast.Constant):
                        found[name.id] = value.value
    return found


def marked(marker: str) -> set[str]:
    """Rules that a test of this folder, or of the training laboratory, carries ``marker`` for."""
    found: set[str] = set()
    here = Path(__file__).parent
    for path in (*here.glob("test_*.py"), *(here.parent / "training").glob("test_*.py")):
        tree = ast.parse(path.read_text())
        words = _words(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).rpartition(".")[2] == marker:
                    found.update(arg.value for arg in decorator.args if isinstance(arg, ast.Constant))
                    found.update(words[arg.id] for arg in decorator.args if isinstance(arg, ast.Name))
    return found


FIRING, QUIET, RECORDED = marked("fires"), marked("quiet"), marked("recorded")
by_id = pytest.mark.parametrize("rule", RULES, ids=[each.id for each in RULES])


def unresolved(need: str) -> str | None:
    """Why one piece of evidence, without alternatives, is no evidence of a capsule; None where it is."""
    family, _, rest = need.partition(".")
    if family == "scalars":
        known = rest in SCALARS
    elif family == "stats":
        known = not rest or rest in get_args(Role)
    elif family == "batches":
        known = not rest or rest in BATCH_ARRAYS or rest in BATCH_ATTRIBUTES
    elif family == "tensors":
        known = rest.partition("/")[0] in TENSOR_GROUPS
    elif family == "records":
        stream, _, name = rest.partition(".")
        known = stream in STREAMS and (
            not name or name in {each.name for each in msgspec.structs.fields(STREAMS[stream])}
        )
    elif family == "manifest":
        known = resolves(Manifest, rest.split("."))
    else:
        known = family in ("rng", "files")
    return None if known else f"{need} names no evidence"


def resolves(type_: Any, path: list[str]) -> bool:
    """Whether a path of fields exists in nested Structs; a mapping holds anything."""
    if not path:
        return True
    for candidate in (type_, *get_args(type_)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            for field in msgspec.structs.fields(candidate):
                if field.name == path[0]:
                    return resolves(field.type, path[1:])
        if candidate is Any or getattr(candidate, "__origin__", candidate) is dict:
            return True
    return False


def test_the_rules_of_this_version_are_all_there() -> None:
    assert {each.id for each in RULES} >= REQUIRED


@by_id
def test_a_rule_is_documented_under_the_fixed_headings_in_their_order(rule: Rule) -> None:
    headings = re.findall(r"^(\S.*):$", rule.documentation, re.MULTILINE)
    assert tuple(headings) == HEADINGS
    for heading, following in zip(HEADINGS, (*HEADINGS[1:], None), strict=True):
        body = rule.documentation.partition(f"\n{heading}:\n")[2]
        body = body.partition(f"\n{following}:\n")[0] if following else body
        assert len(body.split()) >= 3, f"{heading} says nothing"
    assert rule.title
    assert len(rule.title) <= 100


@by_id
def test_a_rule_has_a_test_where_it_fires(rule: Rule) -> None:
    assert rule.id in FIRING


@by_id
def test_a_rule_has_a_near_twin_where_it_is_quiet(rule: Rule) -> None:
    assert rule.report or rule.id in QUIET


@by_id
def test_a_rule_asks_for_evidence_that_exists(rule: Rule) -> None:
    problems = [unresolved(part.strip()) for need in rule.needs for part in need.split("|")]
    assert not any(problems), problems


@by_id
def test_a_rule_is_declared_in_known_words(rule: Rule) -> None:
    assert rule.stage in STAGES
    assert re.fullmatch(r"[a-z0-9]+/[a-z0-9-]+", rule.id)
    known = {each.id for each in RULES}
    assert not set(rule.explained_by) - known
    assert rule.id not in rule.explained_by


def test_markers_name_rules_that_exist() -> None:
    assert not (FIRING | QUIET | RECORDED) - {each.id for each in RULES}


def test_counterfactual_rules_and_the_faults_of_the_demo_fire_on_real_training() -> None:
    counterfactual = {each.id for each in RULES if each.function.__module__.endswith("objective.computation")}
    demo = {"numerics/fp16-overflow", "numerics/learning-rate", "data/poison-sample"}
    assert len(counterfactual) >= 8
    assert counterfactual | demo <= RECORDED


def test_a_need_that_names_no_evidence_is_caught() -> None:
    for need in ("scalars.los", "batches.label", "records.request", "manifest.model.rop", "tensors.x/y", "stats.foo"):
        assert unresolved(need)
    for need in (
        "manifest.model.rope.theta",
        "manifest.config.anything",
        "records.requests.ttft",
        "tensors.attention/q",
    ):
        assert unresolved(need) is None


def test_a_second_rule_under_one_id_and_an_id_without_family_are_refused() -> None:
    def other(capsule: Any) -> list[Any]:
        return []

    other.__module__ = "somewhere.else"
    with pytest.raises(ValueError, match="registered twice"):
        rule("capsule/damaged", stage="capture")(other)
    with pytest.raises(ValueError, match="family/name"):
        rule("lonely", stage="data")(other)


class TestPlugIns:
    @pytest.fixture
    def installed(self, tmp_path: Path):
        """A distribution of somebody else with one entry point; what it points to is given."""

        def install(target: str, group: str = "llmconsole.rules") -> subprocess.CompletedProcess[str]:
            place = tmp_path / "theirs-1.0.dist-info"
            place.mkdir()
            (place / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
            (place / "entry_points.txt").write_text(f"[{group}]\nours = {target}\n")
            (tmp_path / "their_rules.py").write_text(
                "from llmconsole.analyzers.registry import rule\n\n\n"
                "@rule('theirs/late', stage='data')\ndef late(capsule):\n    return ()\n"
            )
            script = (
                "import sys\nfrom llmconsole.analyzers.registry import all_rules, plugin_warnings\n"
                "print('theirs/late' in [each.id for each in all_rules()], 'importlib.metadata' in sys.modules, "
                "len(all_rules()) > 50, *plugin_warnings())"
            )
            environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
            return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)

        return install

    def test_bring_rules_of_others(self, installed: Any) -> None:
        assert installed("their_rules").stdout.split() == ["True", "True", "True"]

    def test_that_are_broken_are_a_warning(self, installed: Any) -> None:
        said = installed("no_such_module").stdout
        assert said.startswith("False True True plug-in ours (no_such_module) was not loaded: ModuleNotFoundError")

    def test_of_other_groups_are_not_even_taken_apart(self, installed: Any) -> None:
        assert installed("their_rules", group="console_scripts").stdout.split() == ["False", "False", "True"]


def test_no_plugin_is_broken_here() -> None:
    assert plugin_warnings() == ()
