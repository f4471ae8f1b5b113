"""The manifest: created once, replaced by its creator only, typed, and free of secrets."""

import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from llmconsole.capsules import Capsule, CapsuleWriter, EvidenceError, writer
from llmconsole.capsules.manifest import Manifest
from llmconsole.capsules.masking import MASK, mask
from llmconsole.capsules.storage import replace

#: Part of the manifest → its fields, as the description of the evidence lists them.
PARTS = {
    "": "format id title status created producer writer phase run trigger position identity identity_inference "
    "tokenizer model training serving placement config environment files",
    "writer": "host pid started",
    "run": "id name host world_size command seed backend restart code overfit",
    "run.code": "commit dirty",
    "trigger": "kind step rank signal value message",
    "position": "global_step tokens_seen epoch data_cursor",
    "identity": "model adapter tokenizer chat_template base_checkpoint",
    "identity.model": "name revision sha256",
    "tokenizer": "vocab_size bos_id eos_id pad_id stop_ids special_ids adds_bos response_template_ids",
    "model": "vocab_size embedding_rows layers hidden intermediate heads kv_heads head_dim experts tied_embeddings "
    "norm_eps dtype max_positions sliding_window use_cache rope causal_alignment vision initialised parameters",
    "model.rope": "style theta scaling",
    "model.vision": "image patch merge has_cls features",
    "training": "objective reduction ignore_index accumulation_steps micro_batch max_length precision optimizer "
    "schedule max_grad_norm loss_masking packing epochs dataset_samples preprocessing_sha256 augmentation dataloader "
    "sharding activation_checkpointing data_parallel tensor_parallel pipeline_parallel",
    "training.optimizer": "name lr betas eps weight_decay decoupled",
    "training.schedule": "name warmup_steps total_steps",
    "training.dataloader": "workers pin_memory prefetch",
    "training.sharding": "kind stage offload",
    "serving": "slo max_batch chunk_size buckets block_size kv_dtype kv_scale prefix_cache",
    "serving.slo": "ttft tpot",
    "environment": "python torch cuda cudnn driver nccl gpu peak_flops peak_bandwidth os container packages",
}


def type_at(path):
    found = Manifest
    for part in filter(None, path.split(".")):
        annotation = str(found.__annotations__[part])
        name = annotation.split(" | ")[0]
        found = getattr(__import__("llmconsole.capsules.manifest", fromlist=[name]), name)
    return found


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_every_field(part):
    assert set(PARTS[part].split()) <= set(type_at(part).__struct_fields__)


class TestWriting:
    def test_it_appears_first_and_says_recording(self, path):
        w = CapsuleWriter(path, title="NaN at 18342", phase="training", clock=lambda: 1_700_000_000.25)
        raw = json.loads((path / "capsule.json").read_text())
        assert raw["format"] == "llmconsole.capsule/1"
        assert raw["status"] == "recording"
        assert raw["title"] == "NaN at 18342"
        assert raw["phase"] == "training"
        assert raw["created"] == "2023-11-14T22:13:20.250Z"
        assert raw["writer"]["pid"] > 0
        assert re.fullmatch(r"[0-9A-HJKMNP-TV-Z]{26}", raw["id"])
        w.close()
        assert json.loads((path / "capsule.json").read_text())["status"] == "sealed"

    def test_only_its_owner_can_read_a_capsule(self, path):
        path.mkdir(mode=0o755)
        with CapsuleWriter(path) as w:
            w.record("events", {"kind": "log"})
            w.tensor("a/b", [1.0], step=0)
            w.attach("x.log", data=b"x")
        for directory in (path, *(each for each in path.rglob("*") if each.is_dir())):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
        for file in (each for each in path.rglob("*") if each.is_file()):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file

    def test_an_exception_marks_the_capsule_crashed_and_is_the_trigger(self, path):
        with pytest.raises(ZeroDivisionError), CapsuleWriter(path, rank=0):
            _ = 1 / 0
        c = Capsule.open(path)
        assert c.status == "crashed"
        assert (c.trigger.kind, c.trigger.message) == ("exception", "ZeroDivisionError: division by zero")

    def test_a_trigger_of_the_rank_is_in_the_manifest_once_the_creator_seals(self, path):
        with CapsuleWriter(path) as w:
            w.heartbeat(trigger={"kind": "nonfinite", "step": 7, "rank": 0, "value": float("nan")}, step=7)
            assert Capsule.open(path).manifest.trigger is None
            assert Capsule.open(path).trigger.step == 7
        trigger = Capsule.open(path).manifest.trigger
        assert (trigger.kind, trigger.step) == ("nonfinite", 7)
        assert np.isnan(trigger.value)

    def test_updates_are_merged_into_what_is_there(self, path):
        with CapsuleWriter(path, manifest={"training": {"reduction": "token-mean"}, "mine": {"a": 1}}) as w:
            w.update({"training": {"optimizer": {"lr": np.float64(1e-3)}}, "mine": {"b": 2}})
        m = Capsule.open(path).manifest
        assert m.training.reduction == "token-mean"
        assert m.training.optimizer.lr == 1e-3
        assert m.raw["mine"] == {"a": 1, "b": 2}

    @pytest.mark.parametrize(
        ("manifest", "message"),
        [
            ({"model": {"layers": -2}}, "manifest: field model.layers is -2, expected int >= 0"),
            (
                {"training": {"optimizer": {"betas": [0.9, "x"]}}},
                "field training.optimizer.betas[1] is 'x', expected float",
            ),
            (
                {"training": {"reduction": "mean"}},
                "field training.reduction is 'mean', expected sequence-mean or sum or",
            ),
            (
                {"model": {"rope": {"style": "llama"}}},
                "field model.rope.style is 'llama', expected half or interleaved",
            ),
            ({"phase": "cooking"}, "field phase is 'cooking', expected agent or evaluation or kernel"),
            ({"run": []}, "field run is [], expected object"),
        ],
    )
    def test_a_wrong_field_is_an_error_before_anything_is_written(self, path, manifest, message):
        with pytest.raises(EvidenceError) as error:
            CapsuleWriter(path, manifest=manifest)
        assert message in str(error.value)
        assert not path.exists()

    def test_what_the_creator_declares_wins_over_what_a_caller_puts_in(self, path):
        with CapsuleWriter(
            path, title="t", manifest={"status": "sealed", "format": "x/9", "title": "other", "id": "I"}
        ):
            c = Capsule.open(path)
            assert (c.manifest.status, c.manifest.format, c.title, c.id) == (
                "recording",
                "llmconsole.capsule/1",
                "t",
                "I",
            )

    def test_a_closed_writer_refuses_and_closing_twice_is_nothing(self, path):
        w = CapsuleWriter(path)
        w.close()
        w.close()
        with pytest.raises(EvidenceError, match="the capsule is closed"):
            w.record("events", {})

    def test_attached_files_are_listed_with_their_digest_and_never_overwrite_each_other(self, path, tmp_path):
        source = tmp_path / "train.log"
        source.write_bytes(b"step 1\n")
        with CapsuleWriter(path) as w:
            assert w.attach(source, kind="log") == "files/train.log"
            assert w.attach("elsewhere/train.log", kind="log", data=b"step 2\n") == "files/train-2.log"
        first, second = Capsule.open(path).files()
        assert (first.path, first.kind, first.bytes) == ("files/train.log", "log", 7)
        # what sha256sum prints for these seven bytes
        assert first.sha256 == "b7126ac71c7f87a2146297b1bd0f53a934b2a189fd3d2995e1ff1358715560c4"
        assert (path / second.path).read_bytes() == b"step 2\n"
        assert Capsule.open(path).damage() == ()

    def test_many_files_are_listed_in_one_manifest(self, path, tmp_path, monkeypatch):
        dumps = [tmp_path / f"_dump_{rank}" for rank in range(50)]
        for each in dumps:
            each.write_bytes(each.name.encode())
        with CapsuleWriter(path) as w:
            written: list[Path] = []
            monkeypatch.setattr(writer, "replace", lambda path, data: (written.append(path), replace(path, data)))
            w.attach_all((each, "trace") for each in dumps)
            assert len(written) == 1
        assert [Path(each.path).name for each in Capsule.open(path).files()] == [each.name for each in dumps]
        assert Capsule.open(path).damage() == ()


def join(path: Path, rank: int, barrier, results) -> None:
    barrier.wait()
    with CapsuleWriter(path, title=f"rank {rank}", rank=rank) as w:
        w.scalar_row(0, {"loss": float(rank)})
        w.attach(f"rank{rank}.log", kind="log", data=b"x")
        results.put((rank, w.creator))
        barrier.wait()


class TestJoining:
    def test_of_several_processes_one_creates_the_capsule_and_all_write_to_it(self, path, processes):
        barrier, results = processes.Barrier(3), processes.Queue()
        started = [processes.Process(target=join, args=(path, rank, barrier, results)) for rank in range(3)]
        for process in started:
            process.start()
        outcome = dict(results.get(timeout=60) for _ in started)
        for process in started:
            process.join(60)
            assert process.exitcode == 0
        (creator,) = [rank for rank, created in outcome.items() if created]
        c = Capsule.open(path)
        assert c.title == f"rank {creator}"
        assert c.ranks == (0, 1, 2)
        assert c.status == "sealed"
        assert [c.scalars("loss", rank=rank).value.tolist() for rank in range(3)] == [[0.0], [1.0], [2.0]]
        assert sorted(each.path for each in c.files()) == [f"files/rank{rank}.log" for rank in range(3)]
        assert c.damage() == ()

    def test_a_joining_rank_changes_nothing_in_the_manifest(self, path):
        with CapsuleWriter(path, title="first") as first:
            with CapsuleWriter(path, title="second", manifest={"run": {"name": "x"}}, rank=1) as second:
                second.update({"run": {"name": "y"}})
                assert (first.creator, second.creator) == (True, False)
            c = Capsule.open(path)
            assert (c.title, c.manifest.run, c.manifest.status) == ("first", None, "recording")

    def test_a_rank_has_one_writer(self, path):
        with (
            CapsuleWriter(path, rank=2),
            pytest.raises(EvidenceError, match="rank 2 of this capsule has a writer already"),
        ):
            CapsuleWriter(path, rank=2)

    def test_the_earliest_trigger_of_all_ranks_counts(self, path):
        with CapsuleWriter(path) as w:
            for rank, step in [(0, 9), (1, 7), (2, 7)]:
                w.heartbeat(trigger={"kind": "spike", "step": step, "rank": rank}, rank=rank)
            assert (Capsule.open(path).trigger.step, Capsule.open(path).trigger.rank) == (7, 1)


@dataclass
class Settings:
    learning_rate: float
    wandb_api_key: str


class TestSecrets:
    @pytest.mark.parametrize(
        "name",
        [
            *(
                "token",
                "hf_token",
                "HF_TOKEN",
                "apiKey",
                "API_KEY",
                "wandb.api_key",
                "password",
                "db_password",
                "secret",
            ),
            *("client_secret", "Authorization", "aws_secret_access_key", "aws_access_key_id", "cookie", "private_key"),
            *("githubToken", "auth_token", "bearer", "credentials", "passphrase", "proxy-authorization", "basic_auth"),
        ],
    )
    def test_a_value_under_a_secret_name_is_masked(self, name):
        assert mask({name: "abc"}) == {name: MASK}
        assert mask({"deep": [{name: ["abc", 5]}]}) == {"deep": [{name: [MASK, MASK]}]}

    @pytest.mark.parametrize(
        "name",
        [
            *(
                "tokenizer",
                "max_tokens",
                "tokens_seen",
                "pad_token",
                "eos_token_id",
                "num_tokens",
                "tokens",
                "token_ids",
            ),
            *("key", "kv_heads", "key_dim", "vocab_keys", "author", "max_new_tokens", "image_token", "special_tokens"),
            *("secretary", "passes", "tokens_per_second", "author_name", "monkey", "compass", "unk_token"),
        ],
    )
    def test_the_vocabulary_of_language_models_stays(self, name):
        assert mask({name: "abc"}) == {name: "abc"}

    @pytest.mark.parametrize(
        "secret",
        [
            "hf_AbCdEfGhIjKlMnOpQrStUvWx",
            "sk-proj-abcdefghijklmnop1234",
            "AKIAIOSFODNN7EXAMPLE",
            "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
            "xoxb-123456789012-abcdefGHIJ",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4",
            "AIzaSyA1234567890abcdefghijklmnopqrstuv",
            "https://hooks.slack.com/services/T000/B000/XXXX",
        ],
    )
    def test_a_text_that_looks_like_a_key_is_masked_wherever_it_stands(self, secret):
        masked = mask({"note": f"use {secret} here", "list": [secret]})
        assert masked == {"note": f"use {MASK} here", "list": [MASK]}

    @pytest.mark.parametrize(
        ("text", "masked"),
        [
            ("postgres://user:hunter2@db:5432/x", f"postgres://{MASK}@db:5432/x"),
            ("Authorization: Bearer abcdefghijkl", f"Authorization: {MASK}"),
            ("curl -H 'bearer abcdefghijkl'", f"curl -H 'bearer {MASK}'"),
            ("password: 'a b', user: c", f"password: {MASK}, user: c"),
            ("python train.py --api-key abc --lr 1e-3", f"python train.py --api-key {MASK} --lr 1e-3"),
            ("HF_TOKEN=abc python train.py", f"HF_TOKEN={MASK} python train.py"),
            ("https://h/x?token=abc&page=2", f"https://h/x?token={MASK}&page=2"),
            ("the token count is high", "the token count is high"),
            ("--max_tokens=512 --tokenizer gpt2", "--max_tokens=512 --tokenizer gpt2"),
            ("s3://bucket/key", "s3://bucket/key"),
        ],
    )
    def test_inside_a_text_only_the_secret_is_masked(self, text, masked):
        assert mask(text) == masked

    def test_a_command_line_as_a_list_hides_the_word_after_the_option(self):
        command = ["train.py", "--hf-token", "abc", "--token=abc", "--lr", "1e-3", "--password", "--verbose"]
        expected = ["train.py", "--hf-token", MASK, f"--token={MASK}", "--lr", "1e-3", "--password", "--verbose"]
        assert mask(command) == expected

    def test_nothing_secret_reaches_the_file_through_the_manifest(self, path):
        manifest = {
            "config": {"settings": Settings(1e-3, "hunter2"), "hf_token": "hunter2", "max_tokens": 512},
            "run": {"command": ["train.py", "--api-key", "hunter2"]},
            "environment": {"packages": {"google-auth": "2.3"}, "deterministic": {"WANDB_API_KEY": "hunter2"}},
        }
        with CapsuleWriter(path, manifest=manifest) as w:
            w.update({"config": {"db": {"password": "hunter2"}}})
        assert b"hunter2" not in (path / "capsule.json").read_bytes()
        m = Capsule.open(path).manifest
        assert m.config["settings"]["learning_rate"] == 1e-3
        assert m.config["max_tokens"] == 512
        assert m.environment.packages == {"google-auth": "2.3"}
