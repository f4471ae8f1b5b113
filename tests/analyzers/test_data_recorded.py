"""Data faults in real runs: real tokenizers and collators, a small model trained by them, the recorder attached."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from llmconsole.analyzers.registry import all_rules
from llmconsole.analyzers.runner import analyze
from llmconsole.capsules import Capsule, CapsuleWriter, Recorder
from llmconsole.capsules.probe.taking import Taker
from llmconsole.capsules.recorder.describe import tokenizer_facts
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

DATA = [each for each in all_rules() if each.stage == "data"]
TEXT = "the cat sat on a mat and the dog ran to town while rain fell over old hills near our quiet green river"
WORDS = TEXT.split()


def sentences(count, seed=0, least=4, most=12):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, generator.integers(least, most))) for _ in range(count)]


def dialogues(count, seed=0):
    return [f"Question: {text}\nAnswer: hi {text}" for text in sentences(count, seed)]


@pytest.fixture(scope="module")
def make_tokenizer():
    """A byte-level BPE trained on the dialogues; ``pad`` names its padding token, ``bos`` whether it adds one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def make(pad="<pad>", bos=False):
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<pad>", "<s>", "</s>", "<mask>"],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        bpe.train_from_iterator(dialogues(60), trainer)
        if bos:
            bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token=pad, mask_token="<mask>"
        )

    return make


class Model(nn.Module):
    """Reads the tokens before each position through a mean: small, causal, and trained like a large one."""

    def __init__(self, vocabulary=400, width=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids):
        hidden = self.tokens(input_ids)
        steps = torch.arange(1, input_ids.shape[1] + 1)[None, :, None]
        return self.head(hidden + hidden.cumsum(1) / steps)


@pytest.fixture
def train(tmp_path):
    """``train(batches, **recorder arguments)``: what the data rules say of a run on these batches."""

    def train(batches, **given):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with Recorder(tmp_path / "runs", model=model, optimizer=optimizer, keep_batches=4, **given) as recorder:
            for batch in batches:
                with recorder.step(batch=batch) as step:
                    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
                    labels = batch.get("labels", batch.get("label", batch["input_ids"]))
                    loss = functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
                    step.loss(loss)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        (path,) = (tmp_path / "runs").glob("*.capsule")
        report = analyze(Capsule.open(path), DATA)
        assert not report.errors
        return report

    return train


def alarms(report):
    return {each.rule: each for each in report.findings if each.severity in ("critical", "warning")}


def collated(tokenizer, texts, size=4, **options):
    """Batches of the library's own collator for language models."""
    from transformers import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    rows = [tokenizer(text, **options) for text in texts]
    kept = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows]
    return [dict(collate(kept[at : at + size])) for at in range(0, len(kept), size)]


@pytest.mark.recorded("data/pad-is-eos")
@pytest.mark.fires("data/pad-is-eos")
def test_the_collator_masks_every_end_of_text_where_padding_is_the_same(make_tokenizer, train):
    texts = [f"{text}</s>" for text in sentences(16)]
    shared = make_tokenizer(pad="</s>")
    found = alarms(train(collated(shared, texts), tokenizer=shared))
    assert list(found) == ["data/pad-is-eos"]
    assert found["data/pad-is-eos"].confidence == "confirmed"


@pytest.mark.quiet("data/pad-is-eos")
@pytest.mark.quiet("data/labels-misaligned")
@pytest.mark.quiet("data/attention-mask-mismatch")
@pytest.mark.quiet("data/missing-field")
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_of_its_own_on_either_side_raises_no_alarm(make_tokenizer, train, side):
    own = make_tokenizer()
    own.padding_side = side
    assert not alarms(train(collated(own, [f"{text}</s>" for text in sentences(16)]), tokenizer=own))


@pytest.mark.recorded("data/bos-count")
@pytest.mark.fires("data/bos-count")
@pytest.mark.parametrize("doubled", [True, False])
def test_a_template_that_writes_bos_before_a_tokenizer_that_adds_it(make_tokenizer, train, doubled):
    tokenizer = make_tokenizer(bos=True)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False) for text in sentences(16)
    ]
    found = alarms(train(collated(tokenizer, texts, add_special_tokens=doubled), tokenizer=tokenizer))
    assert list(found) == (["data/bos-count"] if doubled else [])


@pytest.mark.quiet("data/labels-misaligned")
def test_the_masked_language_model_collator_raises_no_alarm(make_tokenizer, tmp_path):
    from transformers import DataCollatorForLanguageModeling

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    rows = [tokenizer(text, return_special_tokens_mask=True) for text in sentences(32)]
    kept = [{name: row[name] for name in ("input_ids", "attention_mask", "special_tokens_mask")} for row in rows]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=True)
    batches = [dict(collate(kept[at : at + 8])) for at in range(0, 32, 8)]
    assert not alarms(taken(tmp_path, batches, tokenizer=tokenizer))


def completions(tokenizer, texts, template, size=4):
    """A collator that masks everything up to the response template, found in the ids (TRL's completion-only one)."""
    batches = collated(tokenizer, texts, size)
    for batch in batches:
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True):
            ends = [at + len(template) for at in range(len(ids)) if ids[at : at + len(template)] == template]
            labels[: ends[0] if ends else len(ids)] = -100
    return batches


@pytest.mark.recorded("data/template-not-found")
@pytest.mark.fires("data/template-not-found")
@pytest.mark.parametrize("template", ["Answer: ", "Answer:"])
def test_a_template_that_ends_in_a_blank_masks_everything(make_tokenizer, train, template):
    tokenizer = make_tokenizer()
    ids = tokenizer(template)["input_ids"]
    manifest = {"tokenizer": {"response_template_ids": ids}, "training": {"objective": "sft"}}
    report = train(completions(tokenizer, dialogues(16), ids), tokenizer=tokenizer, manifest=manifest)
    found = alarms(report)
    if template == "Answer:":
        assert not found
        return
    finding = found["data/template-not-found"]
    numbers = {entry.name: entry.value for entry in finding.evidence}
    assert (finding.severity, finding.confidence) == ("critical", "confirmed")
    assert numbers["rows with all but the last id"] == 16
    assert numbers["last id in context"] == tokenizer("Answer: hi")["input_ids"][len(ids) - 1]
    assert numbers["rows without a supervised token"] == 1.0


@pytest.mark.recorded("data/packing-contamination")
@pytest.mark.fires("data/packing-contamination")
@pytest.mark.quiet("data/packing-contamination")
@pytest.mark.parametrize("restart", [False, True])
def test_flattened_samples_whose_positions_run_on(make_tokenizer, tmp_path, restart):
    from transformers import DataCollatorWithFlattening

    tokenizer = make_tokenizer()
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in sentences(16)]
    collate = DataCollatorWithFlattening(return_seq_idx=True)
    batches = [dict(collate(rows[at : at + 4])) for at in range(0, 16, 4)]
    for batch in batches:
        if not restart:
            batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    found = alarms(taken(tmp_path, batches, tokenizer=tokenizer))
    assert list(found) == ([] if restart else ["data/packing-contamination"])


@pytest.mark.recorded("data/duplicate-batch")
@pytest.mark.fires("data/duplicate-batch")
@pytest.mark.parametrize("fault", ["each batch twice", "a further epoch"])
def test_a_loader_that_hands_out_each_batch_twice(make_tokenizer, train, fault):
    tokenizer = make_tokenizer()
    batches = collated(tokenizer, [f"{text}</s>" for text in sentences(32)])
    again = [each for batch in batches for each in (batch, batch)] if fault == "each batch twice" else batches * 2
    found = alarms(train(again, tokenizer=tokenizer))
    assert list(found) == (["data/duplicate-batch"] if fault == "each batch twice" else [])


@pytest.mark.recorded("data/labels-misaligned")
@pytest.mark.fires("data/labels-misaligned")
@pytest.mark.parametrize("fault", ["shifted twice", "shuffled"])
def test_labels_of_another_place_or_row(make_tokenizer, tmp_path, fault):
    tokenizer = make_tokenizer()
    batches = collated(tokenizer, [f"{text}</s>" for text in sentences(16)])
    for batch in batches:
        labels = batch["labels"]
        if fault == "shuffled":
            batch["labels"] = labels.roll(1, 0)
        else:
            batch["labels"] = torch.cat((labels[:, 2:], torch.full_like(labels[:, :2], -100)), 1)
    found = alarms(taken(tmp_path, batches, tokenizer=tokenizer, manifest={"training": {"objective": "sft"}}))
    assert found["data/labels-misaligned"].severity == "critical"
    words = "shifted twice" if fault == "shifted twice" else "another row"
    assert words in found["data/labels-misaligned"].summary + found["data/labels-misaligned"].title


@pytest.mark.recorded("data/attention-mask-mismatch")
@pytest.mark.fires("data/attention-mask-mismatch")
def test_a_mask_made_before_the_padding(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    batches = collated(tokenizer, [f"{text}</s>" for text in sentences(16)])
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    found = alarms(taken(tmp_path, batches, tokenizer=tokenizer))
    assert found["data/attention-mask-mismatch"].severity == "critical"


@pytest.mark.recorded("data/missing-field")
@pytest.mark.fires("data/missing-field")
def test_a_collator_that_writes_attn_mask(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    batches = collated(tokenizer, [f"{text}</s>" for text in sentences(16)])
    for batch in batches:
        batch["attn_mask"] = batch.pop("attention_mask")
    found = alarms(taken(tmp_path, batches, tokenizer=tokenizer))
    assert found["data/missing-field"].where.tensor == "attention_mask"


@pytest.mark.recorded("data/truncation", "data/lengths")
@pytest.mark.fires("data/truncation", "data/lengths")
def test_samples_cut_at_the_maximum_length(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    texts = [f"{text}</s>" for text in sentences(96, most=40)]
    batches = collated(tokenizer, texts, size=8, truncation=True, max_length=24)
    report = taken(tmp_path, batches, tokenizer=tokenizer, manifest={"training": {"max_length": 24}})
    found = alarms(report)
    assert list(found) == ["data/truncation"]
    numbers = {entry.name: entry.value for entry in found["data/truncation"].evidence}
    full = sum(len(tokenizer(text)["input_ids"]) >= 24 for text in texts)
    assert numbers["share of samples"] == full / 96
    assert "data/lengths" in {each.rule for each in report.findings}


@pytest.mark.recorded("data/length-outlier")
@pytest.mark.fires("data/length-outlier")
def test_samples_that_were_never_separated(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    texts = sentences(64)
    texts[37] = " ".join(sentences(40, seed=5))
    found = alarms(taken(tmp_path, collated(tokenizer, texts), tokenizer=tokenizer))
    assert found["data/length-outlier"].where.step == 37 // 4


@pytest.mark.recorded("data/low-diversity")
@pytest.mark.fires("data/low-diversity")
def test_few_samples_in_many_epochs_of_fine_tuning(make_tokenizer, train):
    tokenizer = make_tokenizer()
    batches = collated(tokenizer, [f"{text}</s>" for text in sentences(8)])
    found = alarms(train(batches * 12, tokenizer=tokenizer, manifest={"training": {"objective": "sft"}}))
    assert list(found) == ["data/low-diversity"]


@pytest.mark.recorded("data/token-out-of-vocabulary")
@pytest.mark.fires("data/token-out-of-vocabulary")
def test_padding_with_an_id_that_is_no_token(tmp_path):
    rows = [torch.randint(3, 90, (length,)) for length in (9, 5, 7, 6)]
    batch = {"input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=100)}
    assert "data/token-out-of-vocabulary" in alarms(taken(tmp_path, [batch], {"tokenizer": {"vocab_size": 100}}))


def taken(tmp_path, train, manifest=None, validation=(), tokenizer=None):
    """What the data rules say of batches taken by the probe."""
    path = tmp_path / "probe.capsule"
    manifest = {**(manifest or {})} | ({"tokenizer": tokenizer_facts(tokenizer)} if tokenizer is not None else {})
    with CapsuleWriter(path, phase="training", manifest=manifest) as writer:
        taker = Taker(writer, None, None)
        for split, batches in (("train", train), ("validation", validation)):
            for batch in batches:
                taker.add(batch, split)
    report = analyze(Capsule.open(path), DATA)
    assert not report.errors
    return report


@pytest.mark.recorded("data/split-leak")
@pytest.mark.fires("data/split-leak")
@pytest.mark.quiet("data/split-leak")
@pytest.mark.parametrize("overlap", [6, 0])
def test_two_loaders_over_overlapping_halves(tmp_path, overlap):
    rows = torch.randint(0, 500, (64, 12), generator=torch.Generator().manual_seed(0))
    loaders = [
        DataLoader([{"input_ids": row} for row in part], batch_size=8) for part in (rows[: 32 + overlap], rows[32:])
    ]
    found = alarms(taken(tmp_path, loaders[0], validation=loaders[1]))
    assert list(found) == (["data/split-leak"] if overlap else [])
    if overlap:
        assert found["data/split-leak"].evidence[0].value == overlap


@pytest.mark.recorded("data/nonfinite-input")
@pytest.mark.fires("data/nonfinite-input")
def test_a_black_image_divided_by_its_own_deviation(tmp_path):
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    images[4] = 0.0
    batches = [{"pixel_values": (image - image.mean()) / image.std()} for image in images.split(1)]
    found = alarms(taken(tmp_path, batches))
    assert found["data/nonfinite-input"].where.step == 4


@pytest.mark.recorded("data/mixture-shift")
@pytest.mark.fires("data/mixture-shift")
@pytest.mark.quiet("data/mixture-shift")
@pytest.mark.parametrize("shifted", [True, False])
def test_a_shard_of_binary_data_after_text(tmp_path, shifted):
    """Program text, then, from step 60 on, mostly rows of random bytes, as a small model in training sees them."""
    torch.manual_seed(0)
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    model, generator = Model(256), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with CapsuleWriter(tmp_path / "run.capsule", phase="training") as writer:
        for step in range(90):
            share = 0.9 if shifted and step >= 60 else 0.05
            kinds = generator.random(8) < share
            starts = generator.integers(0, len(source) - 33, 8)
            rows = [
                generator.integers(128, 256, 33) if binary else np.frombuffer(source[at : at + 33], np.uint8)
                for binary, at in zip(kinds, starts, strict=True)
            ]
            ids = torch.tensor(np.stack(rows).astype(np.int64))
            loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            writer.scalars("loss", step=[step], value=[loss.item()])
            writer.records("samples", [{"step": step, "domain": "binary" if each else "code"} for each in kinds])
    found = alarms(analyze(Capsule.open(tmp_path / "run.capsule"), DATA))
    assert list(found) == (["data/mixture-shift"] if shifted else [])
    if shifted:
        assert abs(found["data/mixture-shift"].where.step - 60) <= 2
