"""The recorder on models that are built differently from one another."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmconsole.capsules import Capsule, Recorder
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, rope_theta=5000.0))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32))


@pytest.mark.parametrize(
    ("build", "layer"), [(llama, "model.layers.1.mlp.down_proj"), (gpt2, "transformer.h.1.mlp.c_proj")]
)
class TestHuggingFace:
    def test_a_causal_model_with_its_own_loss_is_recorded_whole(self, tmp_path: Path, build: Any, layer: str) -> None:
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids = torch.randint(0, 50, (3, 10))
        labels = ids.clone()
        labels[0, 7:] = -100
        batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder:
            for _ in range(2):
                with recorder.step(batch=batch):
                    loss = model(**batch).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        capsule = Capsule.open(recorder.path)
        facts = capsule.manifest.model
        assert (facts.vocab_size, facts.layers, facts.hidden, facts.heads) == (50, 2, 32, 4)
        first = capsule.batches()[0]
        assert (first.label_layout, sorted(first.keys)) == ("unshifted", ["attention_mask", "input_ids", "labels"])
        assert first.logits.shape == (3, 10, 50)
        # Hugging Face shifts inside: the mean over the supervised positions of the recorded token losses is its loss.
        losses = first.token_loss[~torch.isnan(torch.from_numpy(first.token_loss)).numpy()]
        assert first.reported_loss == pytest.approx(losses.mean(), rel=1e-5)
        assert capsule.scalars("tokens").value.tolist() == [27.0 - 3, 27.0 - 3]
        for role in ("activation", "gradient"):
            assert len(capsule.stats(step=1, role=role, name=layer)) == 1
        assert capsule.trigger is None
        if build is llama:
            assert facts.rope.theta == 5000.0
            assert facts.kv_heads == 2


class Checkpointed(nn.Module):
    def __init__(self, gpt: Any, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = gpt.GPT(), reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner.tokens(ids)
        for block in self.inner.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.inner.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_rows_of_a_run_without_it(run: Any, gpt: Any, reentrant: bool) -> None:
    def rows(kind: bool | None) -> tuple[dict[tuple[str, str], float], list[float], Capsule]:
        recording = run(Checkpointed(gpt, kind), every=1000)
        torch.manual_seed(1)
        for parameter in recording.model.parameters():
            nn.init.normal_(parameter, std=0.3)
        losses = recording.train(2)
        capsule = recording.capsule()
        stats = capsule.stats(step=1)
        keys = list(zip(stats.role, stats.name, strict=True))
        assert len(keys) == len(set(keys))  # the second run of a block adds no second row
        return dict(zip(keys, stats.rms.tolist(), strict=True)), losses, capsule

    plain, plain_losses, _ = rows(None)
    again, losses, capsule = rows(reentrant)
    assert losses == plain_losses
    assert set(again) == set(plain)
    assert again == pytest.approx(plain, rel=1e-5)
    assert capsule.manifest.training.activation_checkpointing is True


class InPlace(nn.Module):
    """Everything that full backward hooks cannot bear."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first, self.act = nn.Embedding(50, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.second, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.1, inplace=True), nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.act(self.first(self.tokens(ids)))
        g = self.drop(self.second(h))
        g += h
        g *= 0.5
        return self.head(g)


def test_modules_that_work_in_place_are_measured_before_and_after(run: Any, gpt: Any) -> None:
    recording = run(InPlace(), every=1000)
    model = recording.model
    recording.train(1)
    inputs, targets = gpt.shifted(1)
    torch.manual_seed(5)
    with torch.no_grad():
        first = model.first(model.tokens(inputs))
        expected = {"first": first, "act": F.relu(first)}
    with recording.recorder.step(batch=(inputs, targets)):
        gpt.cross_entropy(model(inputs), targets).backward()
        recording.optimizer.step()
    stats = recording.capsule().stats(step=1, role="activation")
    rms = dict(zip(stats.name, stats.rms.tolist(), strict=True))
    for name, tensor in expected.items():
        assert rms[name] == pytest.approx(tensor.square().mean().sqrt().item(), rel=1e-5)
    assert set(rms) == {"tokens", "first", "act", "second", "drop", "head"}


class Wrapped(nn.Module):
    """Layers that return dictionaries, tuples and nested lists."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens, self.layer, self.head, self.kind = nn.Embedding(50, 8), Nested(kind), nn.Linear(8, 50), kind

    def forward(self, ids: Tensor) -> Any:
        out = self.layer(self.tokens(ids))
        hidden = out["hidden"] if self.kind == "dict" else out[0]
        logits = self.head(hidden)
        return {"logits": logits, "extra": None} if self.kind == "dict" else (logits, None)


class Nested(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.kind == "dict":
            return {"hidden": y * 2, "states": [y * 3, None], "count": 3}
        return y * 2, (y * 3, torch.tensor([1, 2]))


@pytest.mark.parametrize(("kind", "names"), [
    ("dict", ["layer:hidden", "layer:states:0"]),
    ("tuple", ["layer:0", "layer:1:0"]),
])  # fmt: skip
def test_tensors_inside_dictionaries_and_tuples_have_names(run: Any, gpt: Any, kind: str, names: list[str]) -> None:
    recording = run(Wrapped(kind), every=1000)
    for step in range(2):
        inputs, targets = gpt.shifted(step)
        with recording.recorder.step(batch=(inputs, targets)):
            out = recording.model(inputs)
            gpt.cross_entropy(out["logits"] if kind == "dict" else out[0], targets).backward()
            recording.optimizer.step()
    capsule = recording.capsule()
    activations = list(capsule.stats(step=1, role="activation").name)
    assert activations == ["tokens", "layer.linear", *names, "head"]
    assert names[0] in capsule.stats(step=1, role="gradient").name
    assert names[1] not in capsule.stats(step=1, role="gradient").name  # nothing flows back through it
    assert capsule.batches()[0].logits is not None


def test_a_module_called_twice_has_a_row_for_each_call(run: Any, gpt: Any) -> None:
    class Twice(gpt.GPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            for _ in range(2):
                x = self.blocks[0](x)
            return self.head(x)

    recording = run(Twice(layers=1), every=1000)
    recording.train(2)
    stats = recording.capsule().stats(step=1, name="blocks.0.mix")
    assert [(role, int(call)) for role, call in zip(stats.role, stats.call, strict=True)] == [
        ("activation", 0),
        ("activation", 1),
        ("gradient", 1),
        ("gradient", 0),
    ]


def test_an_evaluation_inside_a_recorded_step_is_left_out(run: Any, gpt: Any) -> None:
    recording = run(every=1000)
    for step in range(2):
        inputs, targets = gpt.shifted(step)
        with recording.recorder.step(batch=(inputs, targets)):
            gpt.cross_entropy(recording.model(inputs), targets).backward()
            recording.model.eval()
            with torch.no_grad():
                recording.model(gpt.shifted(100)[0] * 0)
            recording.model.train()
            recording.optimizer.step()
    stats = recording.capsule().stats(step=1, role="activation", name="head")
    assert stats.call.tolist() == [0]


class TestCompiled:
    """Compiled with the tracing back end alone: what hooks do to the graph does not depend on the code made of it."""

    @pytest.fixture(autouse=True)
    def fresh_compiler(self) -> Any:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch._dynamo.reset()

    def loop(self, recording: Any, gpt: Any, model: Any, steps: int, spoil: int = -1) -> Capsule:
        for step in range(steps):
            inputs, targets = gpt.shifted(step)
            if step == spoil:
                with torch.no_grad():
                    recording.model.blocks[1].up.weight.fill_(math.inf)
            with recording.recorder.step(batch=(inputs, targets)):
                gpt.cross_entropy(model(inputs), targets).backward()
                recording.optimizer.step()
                recording.optimizer.zero_grad()
        return recording.capsule()

    def test_attached_before_it_sees_norms_inside_without_breaking_or_recompiling_the_graph(
        self, run: Any, gpt: Any
    ) -> None:
        recording = run(every=1000)
        compiled = torch.compile(recording.model, backend="aot_eager")
        capsule = self.loop(recording, gpt, compiled, 4)
        counters = torch._dynamo.utils.counters
        assert not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] <= 2
        torch.manual_seed(0)
        eager = run(every=1000)
        expected = self.loop(eager, gpt, eager.model, 4)
        for role in ("activation", "gradient"):
            found, wanted = (each.stats(step=3, role=role) for each in (capsule, expected))
            rms = dict(zip(wanted.name, wanted.rms.tolist(), strict=True))
            shared = {name: value for name, value in zip(found.name, found.rms.tolist(), strict=True) if name in rms}
            assert shared == pytest.approx({name: rms[name] for name in shared}, rel=1e-4)
            assert "blocks.1.down" in shared or role == "gradient"
        assert "blocks.1.down.weight" in capsule.stats(step=3, role="gradient").name
        assert capsule.batches()[0].logsumexp is not None
        messages = [event["message"] for event in capsule.records("events") if event["kind"] == "log"]
        assert any(message.startswith("coverage:") and "compiled regions" in message for message in messages)

    def test_the_first_bad_module_inside_a_compiled_region_is_named(self, run: Any, gpt: Any) -> None:
        recording = run(every=1000)
        compiled = torch.compile(recording.model, backend="aot_eager")
        trigger = self.loop(recording, gpt, compiled, 3, spoil=2).trigger
        assert (trigger.kind, trigger.step) == ("nonfinite", 2)
        assert "first bad activation blocks.1.up" in trigger.message

    def test_attached_after_it_says_what_it_cannot_see(self, gpt: Any, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = gpt.GPT()
        compiled = torch.compile(model, backend="aot_eager")
        inputs, targets = gpt.shifted(0)
        gpt.cross_entropy(compiled(inputs), targets).backward()
        recording = gpt.Run(tmp_path, model=model)
        capsule = self.loop(recording, gpt, compiled, 2)
        messages = [event["message"] for event in capsule.records("events") if event["kind"] == "log"]
        assert any("outputs of 10 of 10 layers were not seen" in message for message in messages)
        assert "head.weight" in capsule.stats(step=1, role="gradient").name

    def test_a_checkpointed_block_compiled_by_the_plain_back_end_trains_as_it_would(self, run: Any, gpt: Any) -> None:
        class Checkpointed(gpt.Block):
            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(super().forward, x, use_reentrant=False)

        model = gpt.GPT()
        model.blocks[1] = Checkpointed(16)
        recording = run(model, every=1000)
        capsule = self.loop(recording, gpt, torch.compile(model, backend="eager"), 2)
        assert len(capsule.scalars("loss")) == 2
        assert "blocks.1.down" in capsule.stats(step=1, role="activation").name

    def test_two_ranks_whose_wrapper_is_compiled_record_batches_and_gradients(self, job: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        jobs = [job(COMPILED_RANKS.format(rank=rank, port=port), f"rank{rank}", runs="runs") for rank in range(2)]
        for each in jobs:
            status, out, err = each.finish()
            assert (status, out) == (0, "done\n"), err
            assert "recording" not in err
        for path in jobs[0].runs.glob("*.capsule"):
            capsule = Capsule.open(path)
            assert [(each.step, each.rank) for each in capsule.batches() if each.logsumexp is not None] == [
                (step, rank) for step in range(3) for rank in range(2)
            ]
            assert len(capsule.scalars("grad_norm_local", rank=1)) == 3
            assert {"0", "1", "2"} <= set(capsule.stats(step=1, rank=0, role="activation").name)
            messages = [event.get("message", "") for event in capsule.records("events")]
            assert any("3 modules run inside compiled regions" in message for message in messages)


COMPILED_RANKS = """
import os, sys
rank = int({rank})
os.environ.update(RANK="{rank}", WORLD_SIZE="2", LOCAL_RANK="{rank}", MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
import torch, torch.nn.functional as F
import torch.distributed as dist
from torch import nn
from llmconsole.capsules import Recorder
torch.set_num_threads(1)
dist.init_process_group("gloo")
for backend in ("eager", "aot_eager"):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(wrapped, backend=backend)
    # Before the first compiled call is early enough, be it of the wrapper or of what the compiler made of it.
    recorder = Recorder(sys.argv[1], model=wrapped if backend == "eager" else compiled, optimizer=optimizer, every=2)
    for step in range(3):
        ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))
        with recorder.step(batch=(ids[:, :-1], ids[:, 1:])):
            F.cross_entropy(compiled(ids[:, :-1]).view(-1, 50), ids[:, 1:].reshape(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    recorder.close()
print("done", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


class TestForwardsThatComputeNothing:
    def test_shapes_tried_within_a_step_are_not_taken_for_its_batch(self, run: Any, gpt: Any, caplog: Any) -> None:
        recording = run()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for step in range(2):
            inputs, targets = gpt.shifted(step)
            with recording.recorder.step(batch=(inputs, targets)) as micro:
                with mode:
                    tried = gpt.cross_entropy(recording.model(inputs), targets)
                micro.log(tried=tried)
                gpt.cross_entropy(recording.model(inputs), targets).backward()
                recording.optimizer.step()
                recording.optimizer.zero_grad()
            with mode, torch.no_grad():
                recording.model(inputs)
        capsule = recording.capsule()
        assert all(each.logsumexp is not None for each in capsule.batches())
        assert len(capsule.batches()) == 2
        assert set(capsule.stats(step=1, role="activation").call) == {0}
        assert [event for event in capsule.records("events") if event["kind"] == "eval_begin"] == []
        assert [record.getMessage() for record in caplog.records if "tried" not in record.getMessage()] == []
