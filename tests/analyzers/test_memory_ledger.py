"""memory/ledger, what would fit, and how a manifest is read for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmconsole.analyzers.finding import Finding
from llmconsole.analyzers.memory.configuration import plan
from llmconsole.analyzers.reference.memory_job import Job, Shape, parameters
from llmconsole.analyzers.reference.memory_model import estimate
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from tests.analyzers.conftest import rule_named
from tests.analyzers.sweep.memory_models import BASE, GPT, measure, peaks, size_of, state_of

LEDGER, CAPACITY = "memory/ledger", "memory/capacity"
GIB = 1 << 30

Make = Callable[..., Capsule]
Findings = Callable[[str, Capsule], list[Finding]]

LLAMA_8B = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "intermediate": 14_336,
    "vocab_size": 128_256,
    "parameters": 8_030_261_248,
    "tied_embeddings": False,
    "dtype": "bfloat16",
    "attention": "fused",
    "norm": "rms",
    "dropout": 0.0,
}
TRAINING = {
    "precision": "bf16-mixed",
    "optimizer": {"name": "AdamW"},
    "micro_batch": 4,
    "max_length": 8192,
    "activation_checkpointing": False,
    "sharding": {"kind": "fsdp"},
    "data_parallel": 8,
}


def nothing(writer: Any) -> None:
    writer.scalars("loss", step=[0, 1], value=[2.0, 2.0])


def values(finding: Finding) -> dict[str, Any]:
    return {each.name: each.value for each in finding.evidence}


def described(shape: Shape, **training: Any) -> dict[str, Any]:
    """A manifest of a small GPT of the sweep, as the recorder would write it."""
    model = {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_positions": shape.positions,
        "parameters": parameters(shape),
        "dtype": "float32",
        "attention": "fused",
        "dropout": 0.0,
    }
    usual = {"precision": "fp32", "optimizer": {"name": "AdamW"}, "activation_checkpointing": False}
    return {
        "model": model,
        "training": usual | training,
        "placement": {"ranks": [{"rank": 0, "device": "cpu"}]},
    }


# -- reading a manifest


def test_a_manifest_gives_the_shape_and_the_job_that_it_describes(build: Make):
    found = plan(build(nothing, {"model": LLAMA_8B, "training": TRAINING}))
    assert (found.missing, found.open, found.beyond) == ((), (), "")
    ((shape, job),) = found.readings
    assert parameters(shape) == LLAMA_8B["parameters"]
    assert (shape.mlp, shape.bias, shape.positions, shape.norm) == ("gated", False, 0, "rms")
    assert (job.batch, job.length, job.precision, job.stage, job.data_parallel) == (4, 8192, "half-master", 3, 8)


@pytest.mark.parametrize(
    ("training", "computed", "precisions", "open_fields"),
    [
        # FSDP gathers weights of float32 as they are, under autocast, or in 16 bits: only what ran tells which.
        ({}, (), {"half-gathered", "autocast"}, ("training.precision",)),
        ({}, ("bfloat16", "bfloat16"), {"half-gathered"}, ()),
        ({}, ("bfloat16", "float32"), {"half-gathered", "autocast"}, ("training.precision",)),
        ({"sharding": {"kind": "ddp"}}, ("bfloat16", "bfloat16"), {"autocast"}, ()),
        ({"precision": "bf16-pure"}, (), {"half"}, ()),
        ({"precision": "bf16-true"}, (), {"half"}, ()),  # Lightning's word
        ({"precision": "32-true"}, (), {"fp32"}, ()),
    ],
)
def test_sharded_weights_of_float32_may_be_computed_with_in_16_bits(
    build: Make, training: dict[str, Any], computed: tuple[str, ...], precisions: set[str], open_fields: tuple[str, ...]
):
    def write(writer: Any) -> None:
        nothing(writer)
        rows = [
            {"step": 0, "order": at, "name": f"layers.{at}", "role": "activation", "dtype": dtype, "shape": [4, 4]}
            for at, dtype in enumerate(computed)
        ]
        writer.stats([{**row, "numel": 16, "rms": 1.0} for row in rows])

    found = plan(build(write, {"model": LLAMA_8B | {"dtype": "float32"}, "training": TRAINING | training}))
    assert {job.precision for _, job in found.readings} == precisions
    assert found.open == open_fields


@pytest.mark.parametrize(
    ("config", "sharding", "precisions"),
    [
        ({"training": {"mixed_precision_param": "bfloat16"}}, "fsdp", {"half-gathered"}),
        ({"fsdp_config": {"param_dtype": "torch.bfloat16"}}, "fsdp", {"half-gathered"}),
        ({"training": {"mixed_precision_param": "float32"}}, "fsdp", {"autocast"}),
        ({"training": {"mixed_precision_param": "bfloat16"}}, "ddp", {"autocast"}),
        ({"training": {"mixed_precision_reduce": "bfloat16"}}, "fsdp", {"half-gathered", "autocast"}),
    ],
)
def test_the_dtype_that_sharded_weights_are_gathered_in_is_read_where_it_is_declared(
    build: Make, config: dict[str, Any], sharding: str, precisions: set[str]
):
    training = TRAINING | {"sharding": {"kind": sharding}}
    for dtype, beside in (("float32", set[str]()), (None, {"half-master"})):
        model = LLAMA_8B | {"dtype": dtype}
        found = plan(build(nothing, {"model": model, "training": training, "config": config}))
        assert {job.precision for _, job in found.readings} == precisions | beside


@pytest.mark.parametrize(
    ("model", "training", "missing"),
    [
        ({"layers": None}, {}, "model.layers"),
        ({}, {"micro_batch": None}, "training.micro_batch"),
        ({}, {"max_length": None}, "training.max_length"),
        ({}, {"optimizer": {"name": "Sophia"}}, "training.optimizer.name"),
        ({"dtype": None}, {"precision": None}, "training.precision"),
        ({}, {"sharding": None}, "training.sharding"),
    ],
)
def test_what_a_manifest_lacks_is_named(build: Make, model: dict[str, Any], training: dict[str, Any], missing: str):
    manifest = {"model": LLAMA_8B | model, "training": TRAINING | training}
    manifest = {part: {k: v for k, v in fields.items() if v is not None} for part, fields in manifest.items()}
    assert plan(build(nothing, manifest)).missing == (missing,)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"experts": 8}, "mixture of experts"),
        ({"parameters": 70_000_000_000}, "no decoder-only transformer"),
        ({"layers": 10**9}, "more layers"),
        ({"heads": 4097}, "no decoder-only transformer"),
    ],
)
def test_what_the_model_does_not_speak_of_is_said(build: Make, model: dict[str, Any], words: str):
    found = plan(build(nothing, {"model": LLAMA_8B | model, "training": TRAINING}))
    assert words in found.beyond
    assert not found.readings


def test_what_is_open_becomes_a_range(build: Make):
    model = {name: value for name, value in LLAMA_8B.items() if name not in ("attention", "parameters")}
    found = plan(build(nothing, {"model": model, "training": TRAINING, "trigger": {"kind": "imported"}}))
    assert set(found.open) == {"model.attention", "model.parameters"}
    peaks = [estimate(shape, job).peak for shape, job in found.readings]
    assert max(peaks) > 2 * min(peaks)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("AdamW", "adamw"),
        ("adamw_torch_fused", "adamw"),
        ("paged_adamw_8bit", "adamw8bit"),
        ("FusedAdam", "adamw"),
        ("SGD", "sgd"),
        ("Adafactor", "adafactor"),
        ("Muon", "muon"),
    ],
)
def test_optimizers_are_known_by_the_names_that_jobs_give_them(build: Make, name: str, known: str):
    found = plan(build(nothing, {"model": LLAMA_8B, "training": TRAINING | {"optimizer": {"name": name}}}))
    assert {job.optimizer for _, job in found.readings} == {known}


# -- the ledger


@pytest.mark.fires(LEDGER)
def test_measured_terms_stand_beside_computed_ones(build: Make, findings_of: Findings):
    """Weights of Llama 3 8B sharded over 8 ranks: 8.03·10⁹ · 2 B / 8 = 2,007,565,312 B; states 12 B each."""
    weights, states = 8_030_261_248 // 4, 8_030_261_248 * 12 // 8

    def fill(writer: Any) -> None:
        measured = {"weights": weights, "gradients": weights, "optimizer": states, "activations": 50 * GIB}
        record = {"step": 5, "phase": "backward", **measured, "allocated": 60 * GIB, "peak": 70 * GIB}
        writer.record("memory", {**record, "reserved": 72 * GIB, "capacity": 80 * GIB})
        writer.record("memory", {"step": 5, "phase": "forward", "weights": weights, "allocated": 40 * GIB})

    (finding,) = findings_of(LEDGER, build(fill, {"model": LLAMA_8B, "training": TRAINING}))
    assert (finding.severity, finding.confidence, finding.kind) == ("info", "confirmed", "hygiene")
    rows = {each.name: each for each in finding.evidence}
    assert (rows["weights"].value, rows["weights"].expected) == (weights, weights)
    assert (rows["optimizer"].value, rows["optimizer"].expected) == (states, states)
    assert rows["fragmentation"].value == 2 * GIB
    assert rows["peak"].value == 70 * GIB
    assert "backward" in rows["peak"].note
    assert rows["unexplained"].value == 70 * GIB - 2 * weights - states - 50 * GIB - round(_communication())


def _communication() -> float:
    ((shape, job),) = [(Shape(**SHAPE_8B), JOB_8B)]
    found = estimate(shape, job)
    return found.communication + found.transient


SHAPE_8B: dict[str, Any] = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "intermediate": 14_336,
    "vocabulary": 128_256,
    "norm": "rms",
    "mlp": "gated",
    "bias": False,
}
JOB_8B = Job(batch=4, length=8192, precision="half-master", stage=3, data_parallel=8, foreach=True)


@pytest.mark.fires(LEDGER)
@pytest.mark.recorded(LEDGER)
def test_a_recorded_run_on_a_cpu_has_exact_terms_and_a_computed_peak(tmp_path: Path, findings_of: Findings):
    torch.manual_seed(0)
    shape = BASE.changed(layers=2, hidden=64, vocabulary=300)
    model = GPT(shape)
    config = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 300, "block_size": shape.positions}
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(tmp_path, model=model, optimizer=optimizer, config=config, every=1) as recorder:
        for _ in range(3):
            ids = torch.randint(0, 300, (4, 65))
            inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            with recorder.step(batch=(inputs, targets)):
                logits = model(inputs)
                F.cross_entropy(logits.view(-1, 300), targets.view(-1)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert recorder.path is not None
    capsule = Capsule.open(recorder.path)
    assert plan(capsule).missing == ()
    (finding,) = findings_of(LEDGER, capsule)
    rows = {each.name: each for each in finding.evidence}
    elements = parameters(shape)
    buffers = 2048 * 2048  # the mask, a byte an entry, which no configuration tells of
    assert (rows["weights"].value, rows["weights"].expected) == (4 * elements + buffers, 4 * elements)
    assert rows["optimizer"].value == pytest.approx(8 * elements, rel=0.01)
    assert rows["activations"].note == "computed"
    measured = measure(shape, Job(batch=4, length=64, device="cpu"))
    readings = [(each, job) for each, job in plan(capsule).readings if each.attention == "fused"]
    highest = max(estimate(each, job).peak for each, job in readings)
    assert highest == pytest.approx(measured.peak, rel=0.1)


@pytest.mark.fires(LEDGER)
def test_the_use_of_the_device_alone_is_undetermined(build: Make, findings_of: Findings):
    def fill(writer: Any) -> None:
        writer.scalars("memory_device_used", step=[0, 1], value=[70.0 * GIB, 75.0 * GIB])

    (finding,) = findings_of(LEDGER, build(fill))
    assert (finding.confidence, finding.cause) == ("undetermined", None)
    assert "snapshot" in finding.summary
    assert values(finding)["memory_device_used"] == 75 * GIB


@pytest.mark.fires(LEDGER)
def test_the_fullest_of_several_devices_is_named(build: Make, findings_of: Findings):
    def fill(writer: Any) -> None:
        writer.scalars("memory_device_used", step=[0, 1], value=[40.0 * GIB, 41.0 * GIB], rank=0)
        writer.scalars("memory_device_used", step=[0, 1], value=[70.0 * GIB, 71.0 * GIB], rank=1)

    (finding,) = findings_of(LEDGER, build(fill))
    assert (finding.title, finding.where.rank) == ("Memory of the device: 71.00 GiB at most", 1)


@pytest.mark.fires(LEDGER)
def test_a_peak_alone_is_told_with_one_next_step(build: Make, findings_of: Findings):
    def fill(writer: Any) -> None:
        writer.scalars("memory_reserved", step=[1, 2], value=[60.0 * GIB, 66.0 * GIB], rank=0)
        writer.scalars("memory_reserved", step=[1, 2], value=[60.0 * GIB, 72.0 * GIB], rank=1)
        writer.record("events", {"kind": "oom", "step": 2, "capacity": 80 * GIB, "requested": GIB, "free": 0})

    (finding,) = findings_of(LEDGER, build(fill))
    assert finding.title == "Memory at the peak: 72.00 GiB, 90.0% of the device"
    assert finding.summary == "At most 72.00 GiB were reserved; nothing tells what they are made of."
    assert (finding.confidence, finding.where.step, finding.where.rank) == ("undetermined", 2, 1)
    assert len(finding.next) == 1


@pytest.mark.fires(LEDGER)
def test_a_table_of_the_allocator_measures_no_term(build: Make, findings_of: Findings):
    """What is unused is no part of the peak, and being given the cache back 45 times is no detail."""
    table = {"allocated": 34 * GIB, "peak": 69 * GIB, "reserved": 74 * GIB, "fragmentation": GIB, "retries": 45}
    (finding,) = findings_of(LEDGER, build(lambda writer: writer.record("memory", table)))
    assert (finding.confidence, finding.cause) == ("undetermined", None)
    assert "45 times" in finding.summary


@pytest.mark.fires(LEDGER)
def test_what_is_unused_now_is_none_of_the_peak_and_failures_are_said(build: Make, findings_of: Findings):
    """60 GiB at the peak of 70 reserved leave 10 unused, though 25 of the 40 that are unused now lie in pieces."""
    table = {"allocated": 30 * GIB, "peak": 60 * GIB, "reserved": 70 * GIB, "fragmentation": 25 * GIB, "ooms": 1}
    (finding,) = findings_of(LEDGER, build(lambda writer: writer.record("memory", table)))
    assert "10.00 GiB more are held unused" in finding.summary
    assert "ran out of memory once" in finding.summary
    assert values(finding)["fragmentation"] == 10 * GIB
    at_the_peak = table | {"allocated": 60 * GIB, "fragmentation": 9 * GIB, "ooms": 0}
    (finding,) = findings_of(LEDGER, build(lambda writer: writer.record("memory", at_the_peak)))
    assert "9.00 GiB more are held unused" in finding.summary
    assert "ran out" not in finding.summary


@pytest.mark.fires(LEDGER)
def test_what_a_framework_logged_of_the_allocator_is_no_use_of_the_device(build: Make, findings_of: Findings):
    def fill(writer: Any) -> None:
        for name, level in (("memory_allocated", 18.2), ("memory_peak", 19.5)):
            writer.scalars(name, step=[1, 2, 3], value=[level * GIB] * 3, side="DeepSpeed")

    (finding,) = findings_of(LEDGER, build(fill))
    assert finding.summary.startswith("At most 19.50 GiB were allocated")
    assert "device" not in finding.summary


@pytest.mark.fires(LEDGER)
def test_the_stacks_that_hold_most_are_named_by_the_jobs_own_lines(build: Make, findings_of: Findings):
    library = {"name": "forward", "file": "/x/site-packages/torch/nn/modules/linear.py", "line": 125}
    own = {"name": "forward", "file": "/home/me/job/model.py", "line": 77}

    def fill(writer: Any) -> None:
        writer.record("memory", {"allocated": 4 * GIB, "peak": 4 * GIB})
        writer.record("allocations", {"action": "live", "size": GIB, "count": 1, "frames": None})
        writer.record("allocations", {"action": "live", "size": 3 * GIB, "count": 12, "frames": [library, own]})

    (finding,) = findings_of(LEDGER, build(fill))
    assert finding.summary.endswith("Largest: 3.00 GiB from forward job/model.py:77 (12 blocks).")


def test_odd_records_of_memory_raise_nothing(build: Make):
    def fill(writer: Any) -> None:
        writer.records("memory", [{}, {"phase": "x", "weights": 0}, {"step": 3, "peak": 0, "reserved": 2**62}])

    report = analyze(build(fill, {"model": {"layers": 0}, "training": {}}), [rule_named(LEDGER)])
    assert not report.errors


# -- what would fit


def out_of_memory(**fields: Any) -> Callable[[Any], None]:
    def fill(writer: Any) -> None:
        nothing(writer)
        writer.record("events", {"kind": "oom", "step": 1, **fields})

    return fill


@pytest.mark.fires(CAPACITY)
def test_what_would_fit_is_what_fits_when_it_is_tried(build: Make, findings_of: Findings):
    """The device is one on which the small GPT does not fit with 32 rows; the proposed batch is then really trained."""
    shape = BASE.changed(layers=2, hidden=64)
    full = measure(shape, Job(batch=32, length=128, device="cpu")).peak
    capacity = full // 2
    event = {"capacity": capacity, "free": 1000, "allocated": capacity - 2000, "reserved": capacity - 1500}
    event |= {"requested": full - capacity + 17 * (1 << 20)}
    manifest = described(shape, micro_batch=32, max_length=128)
    (finding,) = findings_of(CAPACITY, build(out_of_memory(**event), manifest))
    rows = {each.name: each for each in finding.evidence}
    assert rows["computed peak"].value == pytest.approx(full, rel=0.1)
    (name,) = (each for each in rows if each.startswith("with a micro-batch of"))
    assert rows[name].note == "fits"
    batch = int(name.rsplit(" ", 1)[1])
    tried = measure(shape, Job(batch=batch, length=128, device="cpu")).peak
    # The proposal counts the gradients of the micro-batches before it, which this one step does not have.
    assert tried <= capacity
    assert rows[name].value == pytest.approx(tried + 4 * parameters(shape), rel=0.1)
    recomputed = measure(shape, Job(batch=32, length=128, checkpointing="full", device="cpu")).peak
    assert rows["with activation checkpointing"].value == pytest.approx(recomputed, rel=0.1)
    assert (rows["with activation checkpointing"].note == "fits") == (recomputed <= 0.97 * capacity)


@pytest.mark.fires(CAPACITY)
def test_a_large_model_on_one_device_needs_sharding(build: Make, findings_of: Findings):
    """8.03·10⁹ parameters at 16 bytes are 119.7 GiB before any activation: no batch makes them fit into 80 GiB."""
    training = TRAINING | {"sharding": {"kind": "none", "stage": 0}, "data_parallel": 1, "max_length": 2048}
    event = {"capacity": 80 * GIB, "free": GIB, "allocated": 77 * GIB, "reserved": 78 * GIB, "requested": 4 * GIB}
    (finding,) = findings_of(CAPACITY, build(out_of_memory(**event), {"model": LLAMA_8B, "training": training}))
    rows = {each.name: each for each in finding.evidence}
    assert rows["computed peak"].value > 119.7 * GIB
    assert rows["with a micro-batch of 1"].note == "does not fit"
    assert rows["with rows of 128 tokens"].note == "does not fit"
    sharded = "weights, gradients and states sharded over 8 ranks"
    assert rows[f"with {sharded}"].note == "does not fit"
    assert rows[f"with activation checkpointing and {sharded}"].note == "fits"
    assert finding.fix == (f"activation checkpointing and {sharded}",)


@pytest.mark.fires(CAPACITY)
def test_fields_that_are_missing_are_named_and_a_configuration_that_explains_nothing_proposes_nothing(
    build: Make, findings_of: Findings
):
    event = {"capacity": 80 * GIB, "free": GIB, "allocated": 77 * GIB, "reserved": 78 * GIB, "requested": 4 * GIB}
    (finding,) = findings_of(CAPACITY, build(out_of_memory(**event)))
    assert "not on record are the sizes of the model, the rows of a batch" in finding.summary
    small = described(BASE, micro_batch=4, max_length=128)
    (finding,) = findings_of(CAPACITY, build(out_of_memory(**event), small))
    assert "something holds memory that is not in the configuration" in finding.summary
    assert not any(name.startswith("with ") for name in values(finding))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_models_of_a_library_fit_as_they_are_recorded(tmp_path: Path, kind: str):
    """From the manifest that the recorder writes of a Hugging Face model to the bytes that torch allocates for it."""
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 400, "n_positions": 128}
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **ids, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        more = {"intermediate_size": 172, "vocab_size": 400, "max_position_embeddings": 128}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **more))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(0, 400, (4, 96))

    def step() -> None:
        for name in ("forward", "backward", "optimizer", "end"):
            with torch.profiler.record_function(f"mark:{name}"):
                pass
            if name == "forward":
                out = model(input_ids=ids, labels=ids, use_cache=False)
            elif name == "backward":
                out.loss.backward()
            elif name == "optimizer":
                optimizer.step()

    with Recorder(tmp_path, model=model, optimizer=optimizer, every=1) as recorder:
        for _ in range(2):
            with recorder.step(batch={"input_ids": ids, "labels": ids}):
                step()
            optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    base = size_of(model.parameters()) + size_of(state_of(optimizer))
    measured = max(peak for _, peak in peaks(profiler, base))
    assert recorder.path is not None
    found = plan(Capsule.open(recorder.path))
    assert (found.missing, found.open, found.beyond) == ((), (), "")
    ((shape, job),) = found.readings
    assert parameters(shape) == sum(each.numel() for each in model.parameters())
    assert estimate(shape, job).peak == pytest.approx(measured, rel=0.1)
