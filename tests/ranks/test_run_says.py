"""What a run says and writes about itself: where things are, how layers are dealt, what it goes on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig
from isotron.train.announce import dealt_lines, longer_lines, offload_lines, other_tokenizer_lines
from tests.ranks import runs


def test_places_stages_and_the_end_are_said(ranks: Any, tmp_path: Path) -> None:
    there = str(tmp_path / "one")
    cfg = runs.config("gpt", train_iters=2, save=there, pp=2, eval_iters=1, optimizer_cpu_offload=True)
    (code, said), (_, silent) = ranks(2, runs.train_heard, cfg, there)
    assert code == 0 and not silent.strip()
    last = runs.step_dir(there, 2)
    offloaded = "isotron: offloaded: masters and moments in host memory"
    for line in (
        f"isotron: metrics in {there}/metrics.jsonl",
        "isotron: layers per stage: 2 1",
        f"saved {last}",
        offloaded,
    ):
        assert line in said, said
    found = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()]
    events = {line["event"]: line for line in found if "event" in line}
    assert events["start"]["layout"]["schedule"] == "1f1b" and events["saved"]["path"] == last
    assert list(events) == ["start", "saved", "finished"] and events["finished"]["step"] == 2
    (held_out,) = (line for line in found if "eval" in line)
    assert held_out["tokens"] == 4 * 16 and held_out["eval_time_s"] > 0
    again = runs.changed(cfg, load=there)
    said = ranks(2, runs.train_heard, again, there)[0][1]
    assert "already at step 2 of 2; raise --train-iters" in said and "saved" not in said


def test_a_resume_says_when_the_data_has_changed(ranks: Any, tmp_path: Path) -> None:
    prefix, there = runs.write_data(tmp_path), str(tmp_path / "one")
    cfg = runs.config("gpt", data_path=(prefix,), train_iters=2, save=there)
    said = ranks(1, runs.train_heard, cfg, there)[0][1]
    assert "not what this run has read" not in said and "training data: " in said
    longer = runs.changed(cfg, load=there, train_iters=4)
    said = ranks(1, runs.train_heard, longer, there)[0][1]
    assert "not what this run has read" not in said
    assert "training data, segment 1 of 2 (finished): 8 samples" in said and "segment 2 of 2: 8 samples" in said
    assert "isotron: made longer: 8 samples follow the 8 that this run was of, in an order of their own" in said
    with runs.IndexedWriter(prefix, runs.VOCAB) as writer:
        writer.add_document(list(range(100)))
        writer.add_document(list(range(50)))
    said = ranks(1, runs.train_heard, runs.changed(longer, train_iters=6), there)[0][1]
    (line,) = (line for line in said.splitlines() if "not what this run has read" in line)
    assert "30 documents with" in line and line.endswith("then, 2 documents with 150 tokens now")


def test_another_tokenizer_is_said(tmp_path: Path) -> None:
    """The one that the checkpoint has, or none there, says nothing; files of other content do."""
    demo = Path(__file__).parents[2] / "assets/demo_tokenizer/tokenizer.json"
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=str(demo)))
    assert other_tokenizer_lines(tokenizer, tmp_path) == other_tokenizer_lines(None, tmp_path) == []
    tokenizer.save(tmp_path / "tokenizer")
    assert other_tokenizer_lines(tokenizer, tmp_path) == []
    stored = tmp_path / "tokenizer/isotron_tokenizer.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"sha256": {"own.json": "0"}, "vocab_size": 500}))
    (line,) = other_tokenizer_lines(tokenizer, tmp_path)
    assert "own.json of 500 entries then" in line and line.endswith(f"--tokenizer-model {tmp_path / 'tokenizer'}")
    stored.write_text("{")
    assert other_tokenizer_lines(tokenizer, tmp_path) == []


def test_what_is_dealt_and_kept_elsewhere_is_said() -> None:
    usual = runs.config("llama", dp=4)
    assert dealt_lines(usual) == offload_lines(usual.layout) == []
    hybrid = runs.changed(usual, hybrid_context_parallel=True, max_seqlen_per_dp_cp_rank=8)
    (line,) = dealt_lines(hybrid)
    assert "each document on 1, 2, 4 of 4 dp x cp ranks, at most 8 slots" in line and "by multiply-adds" in line
    leaves = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "offload_dir": "/disk"}
    away = {"offload_dir_for": ("state",), "zero": 3, "offload_weights": True, "offload_gradients": True}
    (line,) = offload_lines(runs.changed(usual, **leaves, **away, cpu_offloading=True).layout)
    assert line == (
        "offloaded: masters and moments of 50% of the elements in files of /disk, sums of gradients in host memory, "
        "own shards of weights in host memory, activations of all blocks of each stage in host memory"
    )
    assert longer_lines([], [8]) == longer_lines([8], [8]) == []
