"""Two runs side by side: where they part first, and whether that looks like a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmconsole.analyzers.diff.compare import NothingShared, compare
from llmconsole.analyzers.diff.series import judge, pair_of, resolution
from llmconsole.analyzers.diff.types import Difference
from llmconsole.analyzers.series import Curve
from llmconsole.capsules import Capsule, CapsuleWriter, Recorder
from llmconsole.capsules.importers import import_files
from torch import nn
from torch.nn.functional import cross_entropy

LOGS = Path(__file__).resolve().parents[3] / "shared" / "real" / "text_logs" / "bigscience"

Build = Callable[..., Capsule]


def curve(values: Any, first: int = 0, every: int = 1) -> Curve:
    value = np.asarray(values, np.float64)
    return Curve(first + every * np.arange(len(value)), value)


def parted(left: Any, right: Any, **steps: int) -> tuple[str, int | None]:
    """Manner and step of two curves that are logged at the same steps."""
    found = judge(pair_of("loss", "", curve(left, **steps), curve(right, **steps)))
    return found.manner, found.step


def loss(*values: float, **manifest: Any) -> tuple[Callable[[CapsuleWriter], None], dict[str, Any]]:
    return lambda writer: writer.scalars("loss", step=range(len(values)), value=list(values)), manifest


def falling(points: int, seed: int, noise: float = 0.05) -> np.ndarray[Any, Any]:
    """A loss that falls from ln 32000 with the scatter of real batches."""
    scatter = np.random.default_rng(seed).normal(0, noise, points)
    return 2.5 + 7.9 * np.exp(-np.arange(points) / 40) + scatter


class TestPrecision:
    """Values are compared at the precision with which they were printed."""

    def test_two_and_four_decimals_agree(self) -> None:
        assert parted([5.43, 5.21, 4.98, 4.7], [5.4312, 5.2099, 4.9841, 4.6966]) == ("none", None)

    def test_a_last_digit_counts_where_both_are_printed_alike(self) -> None:
        assert parted([5.43, 5.21, 4.98], [5.43, 5.22, 4.98])[1] == 1

    def test_beyond_half_of_the_coarser_digit_they_differ(self) -> None:
        assert parted([5.43, 5.21, 4.98, 4.71], [5.4312, 5.2199, 4.9841, 4.7066])[1] == 1  # 5.2199 prints as 5.22

    def test_a_float32_of_an_event_file_agrees_with_the_printed_number(self) -> None:
        printed = np.round(falling(50, 1), 4)
        assert parted(printed, falling(50, 1).astype(np.float32)) == ("none", None)

    @pytest.mark.parametrize(
        ("values", "sizes"),
        [
            ([5.43, 0.12], [0.01, 0.01]),
            ([7.072597e-01, 1.244238e01], [1e-7, 1e-5]),  # %.6E of Megatron
            ([3.0, 12.0], [1.0, 1.0]),
            ([0.0, 2.5], [0.1, 0.1]),
            ([float(np.float32(0.1)), 2.0], [2.0**-27, 2.0**-22]),
        ],
    )
    def test_the_last_digit_is_found(self, values: list[float], sizes: list[float]) -> None:
        np.testing.assert_allclose(resolution(np.array(values)), sizes, rtol=1e-6)


class TestManner:
    """A step like a bug's, rounding that grows, the scatter of other data, a constant ratio, or nothing of it."""

    def test_equal_then_far_apart_at_once_is_a_jump(self) -> None:
        left = np.round(falling(60, 3), 4)
        right = left.copy()
        right[30:] += 0.5
        assert parted(left, right) == ("jump", 30)

    def test_one_value_that_is_not_finite_is_a_jump(self) -> None:
        assert parted([3.1, 3.2, 3.3], [3.1, 3.2, np.nan]) == ("jump", 2)
        assert parted([3.1, np.nan, 3.3], [3.1, np.nan, 3.3]) == ("none", None)

    def test_a_tiny_start_that_grows_is_rounding(self) -> None:
        left = falling(80, 4)
        right = left * (1 + 1e-7 * 1.2 ** np.arange(80))
        assert parted(left, right) == ("rounding", 0)

    def test_rounding_that_comes_up_from_below_the_printed_digits_is_no_jump(self) -> None:
        exact = falling(80, 4)
        left, right = np.round(exact, 4), np.round(exact + 1e-7 * 1.25 ** np.arange(80), 4)
        manner, step = parted(left, right)
        assert manner == "rounding"
        assert step is not None
        assert 20 < step < 40  # 10⁻⁷ · 1.25ᵏ passes half of 10⁻⁴ at k ≈ 28

    def test_a_jump_is_seen_over_the_rounding_of_runs_that_are_not_reproducible(self) -> None:
        left = falling(80, 4)
        right = left * (1 + 1e-6 * np.random.default_rng(1).normal(size=80))
        right[40:] *= 1.2
        found = judge(pair_of("loss", "", curve(left), curve(right)))
        assert (found.manner, found.step, found.equal_before) == ("jump", 40, 40)

    def test_a_spike_that_both_runs_survive_is_no_jump(self) -> None:
        left = falling(80, 4)
        right = left * (1 + 1e-6 * np.random.default_rng(1).normal(size=80))
        left[40], right[40] = 9.0, 8.0
        assert parted(left, right)[0] == "rounding"

    def test_what_grew_between_two_distant_reports_is_no_jump(self) -> None:
        exact = falling(40, 5)
        left = np.round(exact, 5)
        right = left.copy()
        right[20:] += np.round(2e-3 * np.random.default_rng(0).normal(1, 0.2, 20), 5)  # 200 digits, ten steps apart
        assert parted(left, right, every=10)[0] == "undetermined"
        assert parted(left, right, every=1)[0] == "jump"

    def test_another_seed_scatters_to_both_sides(self) -> None:
        assert parted(np.round(falling(60, 6), 4), np.round(falling(60, 7), 4))[0] == "data-noise"

    def test_a_constant_ratio_is_named(self) -> None:
        left = np.round(falling(30, 8), 4)
        found = judge(pair_of("loss", "", curve(left), curve(np.round(8 * left, 4))))
        assert found.manner == "constant-ratio"
        assert found.ratio == pytest.approx(8.0, rel=1e-3)

    def test_a_small_lasting_difference_is_not_judged(self) -> None:
        left = np.round(falling(30, 9), 4)
        right = left.copy()
        right[10:] = np.round(right[10:] + 0.0002, 4)
        assert parted(left, right) == ("undetermined", 10)

    def test_apart_from_the_first_shared_step_on_is_said_as_such(self) -> None:
        assert parted([3.1, 3.0, 2.9, 2.8], [4.2, 4.3, 4.1, 4.4]) == ("start", 0)

    def test_over_many_runs_noise_is_never_called_a_jump_and_steps_always_are(self) -> None:
        for seed in range(150):
            rng = np.random.default_rng(seed)
            points, every, decimals = int(rng.integers(40, 200)), int(rng.choice([1, 1, 10])), int(rng.integers(3, 7))
            exact, noise = falling(points, seed, rng.uniform(0.01, 0.1)), rng.normal(1, 0.3, points)
            growth = 10 ** rng.uniform(-8, -6.5) * rng.uniform(1.02, 1.6) ** np.arange(points)
            left, right = np.round(exact, decimals), np.round(exact + np.minimum(growth, 0.05) * noise, decimals)
            assert parted(left, right, every=every)[0] in ("none", "rounding", "undetermined"), seed
            other = np.round(falling(points, seed + 1000, rng.uniform(0.01, 0.1)), decimals)
            assert parted(left, other, every=every)[0] in ("data-noise", "start"), seed
            at = int(rng.integers(3, points - 5))
            stepped = left.copy()
            stepped[at:] = np.round(stepped[at:] * rng.uniform(1.5, 4), decimals)
            assert parted(left, stepped, every=1) == ("jump", at), seed


class TestLogs:
    """Whole runs that were only logged."""

    def test_a_changed_library_is_named_beside_the_first_logged_difference(self, build: Build) -> None:
        """transformers#28316: the same script under 4.35.1 and 4.36.2, first logged at update 9."""

        def under(version: str, value: float) -> Capsule:
            packages = {"transformers": version, "torch": "2.1.2", "some-tool": "1.0"}
            return build(
                lambda writer: writer.scalars("loss", step=[9], value=[value]), {"environment": {"packages": packages}}
            )

        found = compare(under("4.35.1", 0.690468), under("4.36.2", 0.685549))
        assert found.first_divergence is not None
        assert found.first_divergence.step == 9
        assert found.verdict.kind == "start"
        assert found.settings[0].name == "environment.packages.transformers"
        assert "first" in found.verdict.summary

    def test_twice_the_loss_at_twice_the_accumulation_is_normalisation(self, build: Build) -> None:
        """transformers#35438: 10.5949 at the first report with accumulation 1, and erroneously doubled with 2."""
        values = (10.5949, 9.8321, 9.1234, 8.7012)
        left = build(*loss(*values, training={"accumulation_steps": 1}))
        right = build(*loss(*(2 * each for each in values), training={"accumulation_steps": 2}))
        found = compare(left, right)
        assert found.verdict.kind == "constant-ratio"
        assert "Constant ratio ≈ 2.0" in found.verdict.summary
        assert "training.accumulation_steps has the same ratio" in found.verdict.summary
        assert "not the model" in found.verdict.summary

    def test_a_ratio_with_equal_evaluation_is_reporting_alone(self, build: Build) -> None:
        """ms-swift#2361: after an upgrade the logged loss is 8 times higher, the evaluation the same."""

        def run(factor: float) -> Capsule:
            def fill(writer: CapsuleWriter) -> None:
                writer.scalars("loss", step=range(20), value=(factor * falling(20, 1)).tolist())
                writer.scalars("eval_loss", step=[10, 19], value=[2.5, 2.25])

            return build(fill, {"training": {"accumulation_steps": 8}})

        found = compare(run(1.0), run(8.0))
        assert found.verdict.kind == "constant-ratio"
        assert "eval_loss is the same" in found.verdict.summary

    def test_a_norm_that_was_never_reported_is_not_compared(self, build: Build) -> None:
        def run(norm: float, scale: float) -> Capsule:
            def fill(writer: CapsuleWriter) -> None:
                writer.scalars("loss", step=range(5), value=[3.5, 3.4, 3.3, 3.2, 3.1])
                writer.scalars("grad_norm", step=range(5), value=[norm] * 5)
                writer.scalars("loss_scale", step=range(5), value=[scale] * 5)

            return build(fill)

        found = compare(run(0.0, -1.0), run(67.5, 4096.0))
        assert found.same
        assert sum("was not reported by the left run" in note for note in found.notes) == 2

    def test_after_a_resume_the_last_value_of_a_step_counts(self, build: Build) -> None:
        def resumed(writer: CapsuleWriter) -> None:
            writer.scalars("loss", step=[0, 1, 2, 3, 2, 3, 4], value=[5.0, 4.0, 9.0, 9.5, 3.0, 2.5, 2.2])

        found = compare(build(resumed), build(*loss(5.0, 4.0, 3.0, 2.5, 2.2)))
        assert found.same
        assert any("went back 1 time" in note for note in found.notes)

    def test_runs_that_count_from_zero_and_from_one_are_laid_over_one_another(self, build: Build) -> None:
        values = np.round(falling(20, 2), 4).tolist()
        other = build(lambda writer: writer.scalars("loss", step=range(1, 21), value=values))
        found = compare(build(*loss(*values)), other)
        assert found.same
        assert any("moved by -1" in note for note in found.notes)

    def test_other_logging_intervals_are_noted(self, build: Build) -> None:
        values = np.round(falling(41, 2), 4)
        every_tenth = build(lambda writer: writer.scalars("loss", step=range(0, 41, 10), value=values[::10].tolist()))
        found = compare(build(*loss(*values.tolist())), every_tenth)
        assert found.same
        assert any("left logs every 1 steps, right every 10" in note for note in found.notes)

    def test_time_and_memory_are_no_divergence(self, build: Build) -> None:
        def run(seconds: float) -> Capsule:
            def fill(writer: CapsuleWriter) -> None:
                writer.scalars("loss", step=[0, 1], value=[2.0, 1.0])
                writer.scalars("step_time", step=[0, 1], value=[seconds] * 2)

            return build(fill)

        assert compare(run(1.0), run(2.0)).same

    @pytest.mark.parametrize("other", [{"step": [100], "value": [1.0]}, {"step": [], "value": []}])
    def test_without_anything_in_common_there_is_no_answer(self, build: Build, other: dict[str, Any]) -> None:
        with pytest.raises(NothingShared):
            compare(build(*loss(3.0, 2.0)), build(lambda writer: writer.scalars("loss", **other)))

    def test_the_pair_of_bigscience_parts_at_step_three(self, tmp_path: Path) -> None:
        if not LOGS.is_dir():
            pytest.skip("no ../shared/real/text_logs/bigscience")
        paths = [LOGS / f"meg_ds_3d_gpt2_perf_n16-ds-{side}.out" for side in ("on", "off")]
        on, off = (Capsule.open(import_files([path], tmp_path, attach=False)) for path in paths)
        found = compare(on, off)
        first = found.first_divergence
        assert first is not None
        assert (first.step, first.name, first.left, first.right) == (3, "loss", 41.03157, 44.24266)
        assert found.verdict.kind == "jump"
        assert found.series[0].equal_before == 2
        assert [row.differs for row in found.around[:3]] == [False, False, True]
        assert {"grad_norm", "loss_scale"}.isdisjoint(each.name for each in found.series)


class TestEvidence:
    """Batches and tensors decide before curves do."""

    def test_the_first_label_that_differs_is_named(self, build: Build) -> None:
        def run(label: int) -> Capsule:
            def fill(writer: CapsuleWriter) -> None:
                ids = np.arange(12).reshape(2, 6)
                labels = ids.copy()
                labels[1, 2] = label
                writer.batch(step=4, input_ids=ids, labels=labels)
                writer.scalars("loss", step=[3, 4], value=[3.5, 3.25 + label / 1000])

            return build(fill)

        found = compare(run(8), run(-100))
        assert found.verdict.kind == "data"
        batch = found.batches[0]
        assert (batch.step, batch.what, batch.at, batch.left, batch.right) == (4, "labels", (1, 2), 8, -100)
        assert (batch.differing, batch.elements) == (1, 12)

    @pytest.mark.parametrize(
        ("dtype", "factor", "same"),
        [("float32", 1 + 1e-6, True), ("float32", 1.001, False), ("bfloat16", 1.004, True), ("bfloat16", 1.1, False)],
    )
    def test_tensors_differ_where_their_norm_leaves_the_rounding_of_the_dtype(
        self, build: Build, dtype: str, factor: float, same: bool
    ) -> None:
        def run(scale: float) -> Capsule:
            names = ("embed", "layers.0.attn", "layers.0.mlp")
            rows = [
                {"step": 2, "name": name, "role": "activation", "dtype": dtype, "shape": [4, 8], "rms": 0.5 * by}
                for name, by in zip(names, (1.0, scale, 2 * scale), strict=True)
            ]
            return build(lambda writer: writer.stats(rows))

        found = compare(run(1.0), run(factor))
        assert found.same is same
        if not same:
            assert [each.name for each in found.tensors] == ["layers.0.attn", "layers.0.mlp"]
            assert found.verdict.kind == "tensor"


def train(
    folder: Path,
    *,
    seed: int = 0,
    lr: float = 1e-2,
    dtype: Any = torch.float32,
    changed: int = -1,
    shifted: bool = True,
) -> Capsule:
    """A small language model on random text, recorded."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    data = torch.Generator().manual_seed(1)
    with Recorder(folder, model=model, optimizer=optimizer, config={"seed": seed}) as recorder:
        for step in range(12):
            rows = torch.randint(0, 32, (4, 9), generator=data)
            if step == changed:
                rows = (rows + 5) % 32
            inputs, labels = rows[:, :-1], rows[:, 1:]
            with recorder.step(batch={"input_ids": inputs, "labels": labels}):
                scores = model(inputs).float().view(-1, 32)
                cross_entropy(scores, (labels if shifted else inputs).reshape(-1)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return Capsule.open(next(folder.glob("*.capsule")))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Capsule:
    return train(tmp_path_factory.mktemp("healthy"))


class TestRecordedRuns:
    """Real training, recorded twice."""

    def test_one_seed_twice_is_the_same(self, healthy: Capsule, tmp_path: Path) -> None:
        found = compare(healthy, train(tmp_path))
        assert found.same
        assert found.verdict.kind == "none"
        assert not found.tensors

    def test_another_learning_rate_is_a_given_value_before_it_is_a_jump(self, healthy: Capsule, tmp_path: Path) -> None:
        found = compare(healthy, train(tmp_path, lr=3e-2))
        first = found.first_divergence
        assert first is not None
        assert (first.step, first.name) == (0, "learning_rate")
        assert found.verdict.kind == "setting"
        assert next(each for each in found.series if each.name == "loss").step == 1
        assert found.tensors[0].role in ("parameter", "update")  # nothing before the step of the optimizer differs
        assert found.settings[0].name == "training.optimizer.lr"

    def test_another_loss_function_is_the_objective_and_not_another_start(
        self, healthy: Capsule, tmp_path: Path
    ) -> None:
        found = compare(healthy, train(tmp_path, shifted=False))
        first = found.first_divergence
        assert first is not None
        assert (first.step, first.stage, first.name.rpartition(" ")[2]) == (0, "objective", "(loss)")
        assert found.verdict.kind == "start"
        assert "tensors in front of it that were compared agree" in found.verdict.summary
        assert "analyze" in found.verdict.next[0]

    def test_another_seed_parts_at_the_first_tensor(self, healthy: Capsule, tmp_path: Path) -> None:
        found = compare(healthy, train(tmp_path, seed=1))
        assert found.verdict.kind in ("data-noise", "start")
        assert found.tensors[0].order == 0
        assert "The data is the same in all 12 micro-batches" in found.verdict.summary
        assert "seed" in found.settings[0].name

    def test_one_changed_batch_is_named_before_the_loss(self, healthy: Capsule, tmp_path: Path) -> None:
        found = compare(healthy, train(tmp_path, changed=6))
        first = found.first_divergence
        assert first is not None
        assert (first.step, first.stage, first.what) == (6, "data", "batch")
        assert found.verdict.kind == "data"
        assert "loss follows at step 6" in found.verdict.summary

    def test_another_dtype_is_rounding(self, healthy: Capsule, tmp_path: Path) -> None:
        found: Difference = compare(healthy, train(tmp_path, dtype=torch.bfloat16))
        assert found.verdict.kind == "rounding"
        assert "different dtypes" in found.verdict.summary
        assert {each.name for each in found.settings[:2]} == {"training.precision", "model.dtype"}


@pytest.mark.filterwarnings("error")
def test_odd_values_are_compared_without_a_complaint() -> None:
    odd = np.array([0.0, -0.0, 1e-320, 1e308, -1e308, np.inf, -np.inf, np.nan, 5.43, -1.0, 2.0**-1074, 12345678.9])
    rng = np.random.default_rng(3)
    for seed in range(300):
        points = int(rng.integers(1, 24))
        left = rng.choice(odd, points) if seed % 2 else rng.normal(size=points)
        right = np.where(rng.random(points) < 0.5, left, rng.choice(odd, points))
        found = judge(pair_of("loss", "", curve(left), curve(right)))
        assert (found.step is None) == (found.manner == "none")


class TestLogsOfOtherKinds:
    """One run as several programs logged it."""

    @pytest.fixture
    def compared(self, tmp_path: Path) -> Callable[[str, str], Difference]:
        def compared(left: str, right: str) -> Difference:
            capsules: list[Capsule] = []
            for name, text in (("left", left), ("right", right)):
                (tmp_path / f"{name}.log").write_text(text)
                files = import_files([tmp_path / f"{name}.log"], tmp_path / "out", attach=False)
                capsules.append(Capsule.open(files))
            return compare(capsules[0], capsules[1])

        return compared

    def test_means_over_a_logging_interval_agree_with_the_steps(self, compared: Callable[..., Difference]) -> None:
        values = falling(100, 1)
        fine = "".join(f"step {at + 1} | loss: {each:.5f}\n" for at, each in enumerate(values))
        means = values.reshape(-1, 10).mean(1)
        coarse = "".join(f"step {10 * at + 10} | loss: {each:.4f}\n" for at, each in enumerate(means))
        found = compared(fine, coarse)
        assert found.same
        assert any("means over 10 steps" in note for note in found.notes)
        assert any("means over 10 steps" in note for note in compared(coarse, fine).notes)
        assert not compared(fine, coarse.replace(f"{means[6]:.4f}", f"{means[6] + 1:.4f}")).same

    def test_counted_lines_are_laid_beside_steps(self, compared: Callable[..., Difference]) -> None:
        values = falling(30, 2)
        stepped = "".join(f"step {50 * at + 50} | loss: {each:.4f} | lr: 1e-4\n" for at, each in enumerate(values))
        dicts = "".join(f"{{'loss': {each:.4f}, 'learning_rate': 1e-4, 'epoch': 0.1}}\n" for each in values)
        found = compared(stepped, dicts)
        assert found.same
        assert any("names no steps" in note for note in found.notes)

    def test_of_a_loss_and_a_rate_that_part_at_one_step_the_rate_is_named(self, compared: Callable[..., Difference]):
        left = "".join(f"step {at} | loss: {each:.4f} | lr: 1e-4\n" for at, each in enumerate(falling(30, 3)))
        right = "".join(f"step {at} | loss: {each:.4f} | lr: 3e-4\n" for at, each in enumerate(falling(30, 4)))
        assert compared(left, right).verdict.kind == "setting"

    def test_a_small_first_difference_after_one_equal_loss_is_no_jump(self) -> None:
        values = falling(60, 5)
        drift = 2e-3 * np.random.default_rng(6).normal(size=60) * np.minimum(1, np.arange(60) / 20)
        assert parted(values, values + drift)[0] in ("rounding", "undetermined")
        drift[1:] += 0.5
        assert parted(values, values + drift)[0] == "jump"
