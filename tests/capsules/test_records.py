"""Every record stream: its fields exist, are checked when written and when read, and nothing unknown is lost."""

import json
import math
from zlib import crc32

import numpy as np
import pytest
from llmconsole.capsules import Capsule, CapsuleWriter, EvidenceError
from llmconsole.capsules.streams import STREAMS

#: Stream → its fields, as the description of the evidence lists them (nested objects below).
FIELDS = {
    "events": "kind batch_sha256 data_cursor scale_before scale_after training_mode grad_enabled path expected loaded "
    "missing unexpected version type message requested free allocated reserved capacity other_processes phase level "
    "logger epoch batch sample_ids shapes nested",
    "samples": "id sha256 split source domain length image_size truncated epoch loss text",
    "microbatches": "micro tokens loss_sum loss_mean window",
    "param_groups": "group name shape dtype requires_grad weight_decay lr has_grad grad_norm update_norm "
    "weight_absmedian moved_fraction state state_step master_dtype adapter shared_with in_optimizer",
    "checksums": "name rank sha256 kind side",
    "recompute": "module forward_rng_sha256 recompute_rng_sha256 max_abs_difference",
    "collectives": "group group_ranks seq order op dtype shapes_in shapes_out state t_created t_started t_completed "
    "timeout_s default_timeout_s p2p peer frames async_op waited buffer_reused_before_wait stream_synced",
    "ranks": "host clock_offset_s steps samples_seen samples_skipped skip_reason exit last_seq compute_ms "
    "communication_ms data_ms",
    "scaling": "world_size global_batch throughput",
    "memory": "phase weights gradients optimizer activations communication transient fragmentation kv_cache allocated "
    "reserved peak capacity largest_free_block",
    "allocations": "action address size stream t category frames",
    "segments": "address total allocated active blocks",
    "kernel_checks": "kernel pass case shape strides dtypes max_abs max_rel rms tolerance nonfinite max_abs_vs_first "
    "reference time_ms reference_ms syncs backend ops position_error",
    "requests": "id arrival first_token finished queue tokenize prefill transfer install sample network ttft e2e "
    "server_e2e itl prompt_tokens output_tokens max_tokens cached_tokens prompt_sha256 block_hashes tenant priority "
    "worker gpu rack network_path compile_bucket batch_size concurrent_decodes preemptions migrations retries cold "
    "status weight_version temperature output_sha256",
    "counters": "name value labels t",
    "kv_events": "kind request blocks block_size refcount hash parent_hash tokens matched_tokens key event_id "
    "descriptor checksum layers total_blocks engine_step free referenced cached",
    "generations": "id prompt_ids output output_ids finish_reason sampling stop_ids logprobs reference_logprobs "
    "reference_output training_mode cached_tokens image_present image_blank correct",
    "evaluations": "name suite slice value n stderr repeat checkpoint_sha256 harness harness_version template_sha256 "
    "preprocessing_sha256 training_mode dtype higher_is_better",
    "environments": "side packages libraries cuda cudnn driver gpu container dtype quantisation flags",
    "profile": "step window_ms compute_ms communication_ms copy_ms idle_ms data_ms python_ms logging_ms sync_ms "
    "launches recompiles graph_breaks top",
    "rag_documents": "id sha256 text tokens acl valid_from valid_to chunks embedder",
    "rag_queries": "id text time principal gold stages threshold context_limit answer expected_answer answer_correct "
    "claims citations embedder reported",
    "agent_steps": "run turn kind call_id parent_call_id attempt tool arguments effect idempotency_key checks status "
    "outcome result error control_from_result environment_sha256 resources memory domain tokens",
    "agent_outcomes": "run claimed_success claims predicate expected_writes reward resources_open",
    "media_samples": "id image resized crop boxes_source boxes_model box_convention placeholders features patch merge "
    "has_cls patch_order tile_order tubelet_order media_sha256 feature_sha256 padding_mask_sum valid_length video "
    "audio",
    "modal_losses": "modality loss_sum tokens reported",
    "codebooks": "size counts tokens latent_scale expected_latent_scale",
    "diffusion": "prediction_type sampler_prediction_type alpha_bar_last zero_terminal_snr sampler",
}

#: One fault for each stream: the record, and what the message says of it.
FAULTS = [
    ("events", {"scale_before": "x"}, "field scale_before is 'x', expected float"),
    ("samples", {"length": -1}, "field length is -1, expected int >= 0"),
    ("microbatches", {"tokens": 1.5}, "field tokens is 1.5, expected int"),
    ("param_groups", {"state": {"exp_avg": {"rms": "x"}}}, "field state.exp_avg.rms is 'x', expected float"),
    ("checksums", {"kind": "weight"}, "field kind is 'weight', expected buffer or parameter or rng"),
    ("recompute", {"module": 3}, "field module is 3, expected str"),
    ("collectives", {"shapes_in": [[2, 3], [4, -1]]}, "field shapes_in[1][1] is -1, expected int >= 0"),
    ("ranks", {"exit": {"kind": "fine"}}, "field exit.kind is 'fine', expected exception or hang or ok or oom or sig"),
    ("scaling", {"world_size": -8}, "field world_size is -8, expected int >= 0"),
    ("memory", {"peak": "80G"}, "field peak is '80G', expected int"),
    ("allocations", {"frames": [{"line": "x"}]}, "field frames[0].line is 'x', expected int"),
    ("segments", {"blocks": [{"size": -1}]}, "field blocks[0].size is -1, expected int >= 0"),
    ("kernel_checks", {"pass": "sideways"}, "field pass is 'sideways', expected backward or forward"),
    ("requests", {"itl": [0.1, "x"]}, "field itl[1] is 'x', expected float"),
    ("counters", {"labels": {"a": 1}}, "field labels.a is 1, expected str"),
    ("kv_events", {"key": {"adapter": 1}}, "field key.adapter is 1, expected str"),
    ("generations", {"sampling": {"beams": -2}}, "field sampling.beams is -2, expected int >= 0"),
    ("evaluations", {"n": -3}, "field n is -3, expected int >= 0"),
    ("environments", {"packages": {"torch": 2}}, "field packages.torch is 2, expected str"),
    ("profile", {"top": [{"calls": -1}]}, "field top[0].calls is -1, expected int >= 0"),
    ("rag_documents", {"chunks": [{"start": -1}]}, "field chunks[0].start is -1, expected int >= 0"),
    ("rag_queries", {"stages": {"ann": [{"score": "x"}]}}, "field stages.ann[0].score is 'x', expected float"),
    ("agent_steps", {"outcome": "maybe"}, "field outcome is 'maybe', expected applied or not_applied or unknown"),
    ("agent_outcomes", {"claims": ["paid"]}, "field claims[0] is 'paid', expected object"),
    ("media_samples", {"video": {"frames": -1}}, "field video.frames is -1, expected int >= 0"),
    ("modal_losses", {"tokens": -1}, "field tokens is -1, expected int >= 0"),
    ("codebooks", {"counts": [1, -1]}, "field counts[1] is -1, expected int >= 0"),
    ("diffusion", {"zero_terminal_snr": 1}, "field zero_terminal_snr is 1, expected bool"),
    ("something_else", {"step": -1}, "field step is -1, expected int >= 0"),
]


def read_back(path, stream, *records):
    with CapsuleWriter(path) as w:
        w.records(stream, records)
    return Capsule.open(path).records(stream)


def test_every_stream_has_every_field():
    assert set(FIELDS) == set(STREAMS)
    for stream, fields in FIELDS.items():
        missing = {*fields.split(), "step", "rank", "t"} - set(STREAMS[stream].__struct_encode_fields__)
        assert not missing, stream


@pytest.mark.parametrize(("stream", "record", "message"), FAULTS, ids=[each[0] for each in FAULTS])
class TestFaults:
    def test_a_faulty_record_is_refused_with_stream_number_field_value_and_expectation(
        self, path, stream, record, message
    ):
        with CapsuleWriter(path) as w:
            w.record(stream, {"step": 1})
            with pytest.raises(EvidenceError) as error:
                w.records(stream, [{"step": 2}, record, {"step": 3}])
        assert f"{stream}, record 3: {message}" in str(error.value)
        assert [each["step"] for each in Capsule.open(path).records(stream)] == [1, 2]

    def test_a_faulty_field_in_the_file_is_left_out_and_reported(self, path, stream, record, message):
        with CapsuleWriter(path) as w:
            w.record(stream, {"t": 5.0})
        with (path / f"ranks/rank00000/records/{stream}.jsonl").open("a") as file:
            file.write(json.dumps(record | {"mine": 7}) + "\n")
        c = Capsule.open(path)
        first, second = c.records(stream)
        assert first["t"] == 5.0
        assert second["mine"] == 7
        (damage,) = c.damage()
        assert message in damage.what
        assert damage.where == f"ranks/rank00000/records/{stream}.jsonl line 2"


class TestRoundTrip:
    def test_numbers_that_are_not_finite_come_back_as_numbers(self, path):
        record = {"id": "r", "ttft": math.nan, "e2e": {"value": math.inf, "clock": "server"}, "itl": [0.1, -math.inf]}
        (read,) = read_back(path, "requests", record | {"mine": [math.nan, {"deep": math.inf}]})
        assert math.isnan(read["ttft"])
        assert read["e2e"] == {"value": math.inf, "clock": "server"}
        assert read["itl"] == [0.1, -math.inf]
        assert math.isnan(read["mine"][0])
        assert read["mine"][1] == {"deep": math.inf}

    def test_a_text_that_spells_a_number_stays_a_text(self, path):
        step = {"kind": "tool_result", "result": "NaN", "arguments": {"value": "Infinity"}, "tool": "NaN"}
        (read,) = read_back(path, "agent_steps", step)
        assert (read["result"], read["arguments"], read["tool"]) == ("NaN", {"value": "Infinity"}, "NaN")

    def test_in_the_file_they_are_the_three_strings(self, path):
        read_back(path, "requests", {"ttft": math.nan, "e2e": math.inf, "itl": [-math.inf]})
        line = (path / "ranks/rank00000/records/requests.jsonl").read_text()
        assert line.startswith('{"ttft":"NaN","e2e":"Infinity","itl":["-Infinity"],"crc32":"')

    def test_bare_tokens_of_other_writers_are_read(self, path):
        with CapsuleWriter(path) as w:
            w.record("requests", {"id": "a"})
        with (path / "ranks/rank00000/records/requests.jsonl").open("a") as file:
            file.write('{"id": "b", "ttft": NaN, "itl": [Infinity, -Infinity]}\n')
        c = Capsule.open(path)
        read = c.records("requests")[1]
        assert math.isnan(read["ttft"])
        assert read["itl"] == [math.inf, -math.inf]
        assert c.damage() == ()

    def test_numpy_and_torch_values_are_plain_numbers_in_the_file(self, path):
        torch = pytest.importorskip("torch")
        record = {"step": np.int32(3), "loss": np.float32(0.5), "length": np.uint8(4), "truncated": np.bool_(True)}
        (read,) = read_back(path, "samples", record | {"mine": np.arange(2), "other": torch.tensor([0.5])})
        assert read == {
            "step": 3,
            "loss": 0.5,
            "length": 4,
            "truncated": True,
            "mine": [0, 1],
            "other": [0.5],
            "rank": 0,
        }
        assert type(read["step"]) is int
        assert type(read["truncated"]) is bool

    def test_unknown_streams_and_fields_are_kept(self, path):
        with CapsuleWriter(path) as w:
            w.record("my.stream-2", {"a": {"b": [1, None]}, "step": 4})
            w.record("events", {"kind": "coffee", "mine": "yes"})
        c = Capsule.open(path)
        assert c.records("my.stream-2") == [{"a": {"b": [1, None]}, "step": 4, "rank": 0}]
        assert c.records("events") == [{"kind": "coffee", "mine": "yes", "rank": 0}]
        assert c.record_streams() == ("events", "my.stream-2")
        assert c.records("absent") == []

    def test_a_record_says_its_rank_and_otherwise_belongs_to_its_directory(self, path):
        with CapsuleWriter(path) as w:
            w.record("ranks", {"rank": 5, "host": "a"})
            w.record("ranks", {"host": "b"}, rank=2)
        c = Capsule.open(path)
        assert [(each["rank"], each["host"]) for each in c.records("ranks")] == [(5, "a"), (2, "b")]
        assert [each["host"] for each in c.records("ranks", rank=5)] == ["a"]

    @pytest.mark.parametrize("text", ["\ud800 alone", "\x00\x1b[31m", "null", "文字 \u202e", '"}\n{"'])
    def test_any_text_survives(self, path, text):
        assert read_back(path, "samples", {"text": text})[0]["text"] == text

    def test_a_line_ends_in_the_checksum_of_what_stands_before_it(self, path):
        read_back(path, "samples", {"id": "a", "length": 3})
        line = (path / "ranks/rank00000/records/samples.jsonl").read_bytes()
        body = b'{"id":"a","length":3,'
        assert line == body + b'"crc32":"%08x"}\n' % crc32(body)

    @pytest.mark.parametrize(
        ("stream", "record", "message"),
        [
            ("../escape", {}, "stream name '../escape' is not made of"),
            (".hidden", {}, "stream name '.hidden' is not made of"),
            ("events", {"crc32": "x"}, "the field name crc32 is reserved"),
            ("events", [1], "expected object"),
        ],
    )
    def test_what_the_format_cannot_hold_is_refused(self, path, stream, record, message):
        with CapsuleWriter(path) as w, pytest.raises(EvidenceError, match=message):
            w.record(stream, record)

    def test_a_record_that_contains_itself_is_refused(self, path):
        record = {"kind": "log"}
        record["mine"] = record
        with CapsuleWriter(path) as w, pytest.raises(EvidenceError, match="nested deeper than 64 levels"):
            w.record("events", record)

    def test_a_record_too_deep_to_be_read_is_not_written(self, path):
        deep = {}
        for _ in range(70):
            deep = {"a": deep}
        with CapsuleWriter(path) as w, pytest.raises(EvidenceError, match="nested deeper than 64 levels"):
            w.record("events", {"mine": deep})
