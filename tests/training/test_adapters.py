"""Adapters of the real peft: what the recorder keeps of a layer, and a merge that was forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, Recorder
from torch import nn

from tests.training.lab import data
from tests.training.lab.loop import inputs_of, loss_sum
from tests.training.lab.model import GPT

RULE = "optimizer/adapter-merged-twice"


def adapted_run(directory: Path, *, merge_at: int | None, **settings: object) -> Capsule:
    """Twelve steps of adapters under dropout; at ``merge_at`` weights are sent elsewhere with the adapter in them."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["qkv", "up"], **settings)
    model = get_peft_model(GPT(), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch = data.padded(data.documents(8, 0))
    with Recorder(directory, model=model, optimizer=optimizer, every=5) as recorder:
        for step in range(12):
            if step == merge_at:
                for module in model.modules():
                    if isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
                        module.base_layer.weight.data += module.get_delta_weight("default")
            with recorder.step(batch=batch):
                loss_sum(model(**inputs_of(batch)), batch["labels"]).div(100).backward()
                optimizer.step()
                optimizer.zero_grad()
    return Capsule.open(recorder.path)


def said(capsule: Capsule) -> list[tuple[str, str | None, int | None]]:
    report = analyze(capsule, [each for each in all_rules() if each.id == RULE])
    assert not report.errors
    return [(each.confidence, each.cause, each.where.step) for each in report.findings]


@pytest.mark.fires(RULE)
@pytest.mark.recorded(RULE)
def test_an_adapter_merged_into_its_base_and_added_again_is_confirmed(tmp_path: Path):
    ((confidence, cause, step),) = said(adapted_run(tmp_path, merge_at=10))
    assert (confidence, step) == ("confirmed", 10)
    assert "twice" in cause


@pytest.mark.fires(RULE)
def test_an_adapter_that_has_moved_on_since_it_was_merged_is_said_to_be_none_of_the_named(tmp_path: Path):
    assert said(adapted_run(tmp_path, merge_at=9)) == [("undetermined", None, 10)]


@pytest.mark.quiet(RULE)
def test_dropout_before_the_adapter_is_not_taken_for_a_fault(tmp_path: Path):
    capsule = adapted_run(tmp_path, merge_at=None, lora_dropout=0.2)
    assert capsule.tensors("adapter/*/output")
    assert not said(capsule)


@pytest.mark.quiet(RULE)
def test_adapters_that_are_more_than_a_product_are_left_alone(tmp_path: Path):
    assert not adapted_run(tmp_path, merge_at=None, use_dora=True).tensors("adapter/*")
