"""Every rule from both sides; every message names its options and a value that works."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest

from isotron.config.catalogue import catalogue
from isotron.config.check import FIRST, RULES, broken, check, finish
from isotron.config.load import load
from isotron.config.rules import RANGES, Facts, flag, nearest_divisor
from isotron.config.schema import RunConfig, value

BASE = (
    "--hidden-size 64 --num-attention-heads 4 --num-layers 4 --train-iters 100 --mock-data --vocab-size 100 "
    "--device cpu"
)
FILES = {f"{p}{end}" for p in ("corpus_text_document", "plain") for end in (".bin", ".idx")} | {"t.json", "v", "m", "."}
SUMS = Path(__file__).parents[1] / "fixtures" / "sums_chosen.csv"

# rule: (options that break it, options that satisfy it, facts)
BOTH_SIDES: dict[str, tuple[str, str, dict]] = {
    "heads divide the width": ("--hidden-size 66", "--hidden-size 66 --num-attention-heads 3", {}),
    "rotary heads are even": ("--head-dim 15", "--family gpt --hidden-size 60", {}),
    "longrope factors": ("--rope-scaling longrope --head-dim 4 --rope-short-factor 1.0,2.0",
                         "--rope-scaling longrope --head-dim 4 --rope-short-factor 1.0,2.0 "
                         "--rope-long-factor 1.0,4.0", {}),
    "dynamic stretch has pairs": ("--head-dim 2 --rope-scaling dynamic", "--head-dim 4 --rope-scaling dynamic", {}),
    "a search that finds": ("--pp 2 --schedule-memory 0.5 --global-batch-size 4",
                            "--pp 2 --schedule-memory 2 --global-batch-size 4", {}),
    "groups divide heads": ("--num-key-value-heads 3", "--num-key-value-heads 2", {}),
    "tp divides heads": ("--tp 8", "--tp 4", {}),
    "tp and groups divide": ("--num-attention-heads 12 --head-dim 16 --num-key-value-heads 6 --tp 4",
                             "--num-attention-heads 8 --num-key-value-heads 2 --tp 4", {}),
    "tp divides the MLP": ("--tp 4 --ffn-hidden-size 130", "--tp 4 --ffn-hidden-size 132", {}),
    "tp divides the sequence": ("--tp 4 --sequence-parallel --seq-length 30",
                                "--tp 4 --seq-length 30", {}),
    "cp divides the sequence": ("--cp 2 --seq-length 30", "--cp 2 --seq-length 32", {}),
    "types of cp": ("--cp-comm-type p2p a2a", "--cp-comm-type p2p a2a p2p allgather", {}),
    "cp divides heads": ("--hybrid-context-parallel --dp 8 --cp-comm-type a2a --max-seqlen-per-dp-cp-rank 512",
                         "--hybrid-context-parallel --cp 2 --dp 2 --cp-comm-type a2a", {}),
    "levels of cp": ("--cp 4 --cp-comm-type a2a+p2p --hierarchical-cp-sizes 2,3",
                     "--cp 4 --cp-comm-type a2a+p2p --hierarchical-cp-sizes 2,2", {}),
    "documents dealt anew": ("--hybrid-context-parallel --dp 2 --rope-scaling dynamic",
                             "--hybrid-context-parallel --dp 2 --cp 3 --seq-length 510 --max-seqlen-per-dp-cp-rank 255 "
                             "--zero 3 --pp 2 --hidden-dropout 0.1 --trace 2", {}),
    "documents fit their groups": ("--hybrid-context-parallel --dp 2 --max-seqlen-per-dp-cp-rank 10",
                                   "--hybrid-context-parallel --dp 2 --max-seqlen-per-dp-cp-rank 512", {}),
    "costs of documents": ("--max-seqlen-per-dp-cp-rank 1024",
                           "--hybrid-context-parallel --dp 2 --hybrid-costs 1.0,0.5", {}),
    "levels are used": ("--cp 4 --hierarchical-cp-sizes 2,2",
                        "--cp 4 --cp-comm-type a2a+p2p --hierarchical-cp-sizes 2,2", {}),
    "blocks with experts": ("--num-experts 8 --moe-layer-freq [0]*3", "--num-experts 8 --moe-layer-freq [0]+[1]*3", {}),
    "topk experts exist": ("--num-experts 2 --moe-router-topk 3", "--num-experts 2 --moe-router-topk 2", {}),
    "groups of experts": ("--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1",
                          "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1", {}),
    "tp divides experts": ("--num-experts 4 --tp 2 --moe-ffn-hidden-size 33",
                           "--num-experts 4 --tp 2 --moe-ffn-hidden-size 34", {}),
    "experts to be dealt": ("--ep 2 --dp 2", "--num-experts 4 --ep 2 --dp 2", {}),
    "ep divides experts": ("--num-experts 6 --ep 4 --dp 4", "--num-experts 8 --ep 4 --dp 4", {}),
    "experts fold the ranks": ("--num-experts 4 --ep 4 --dp 2 --tp 2", "--num-experts 4 --ep 4 --etp 1 --dp 2 --tp 2",
                               {}),
    "shards divide the experts' ranks": ("--num-experts 4 --dp 4 --tp 3 --num-attention-heads 3 --head-dim 16 --ep 2 "
                                         "--etp 2 --zero-shard-size 2 --hidden-size 48 --ffn-hidden-size 48",
                                         "--num-experts 4 --dp 4 --tp 2 --ep 2 --etp 1 --zero-shard-size 2", {}),
    "halves that travel": ("--num-experts 4 --dp 2 --ep 2 --moe-token-dispatcher-type allgather "
                           "--overlap-moe-expert-parallel-comm",
                           "--num-experts 4 --dp 2 --ep 2 --overlap-moe-expert-parallel-comm", {}),
    "padding needs a capacity": ("--num-experts 4 --moe-pad-expert-input-to-capacity",
                                 "--num-experts 4 --moe-pad-expert-input-to-capacity "
                                 "--moe-expert-capacity-factor 1.0", {}),
    "a gate needs a shared expert": ("--num-experts 4 --moe-shared-expert-gate",
                                     "--num-experts 4 --moe-shared-expert-gate "
                                     "--moe-shared-expert-intermediate-size 8", {}),
    "a balance loss has a kind": ("--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type none",
                                  "--num-experts 4 --moe-aux-loss-coeff 0.1", {}),
    "sinkhorn alone": ("--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-enable-expert-bias",
                       "--num-experts 4 --moe-router-load-balancing-type sinkhorn", {}),
    "whole sequences for experts": ("--num-experts 4 --cp 2 --moe-expert-capacity-factor 1.0", "--num-experts 4 --cp 2",
                                    {}),
    "kernels that can drop": ("--attention-backend flash --attention-dropout 0.1",
                              "--attention-backend unfused --attention-dropout 0.1", {}),
    "predictions untie": ("--family deepseek_v3 --mtp-num-layers 1 --tie-embeddings",
                          "--family deepseek_v3 --mtp-num-layers 1", {}),
    "layers per stage": ("--pp 2 --layers-per-stage 1,2", "--pp 2 --layers-per-stage 4,0", {}),
    "blocks that are cut": ("--family neox --pp 2 --layers-per-stage 1.5,2.5",
                            "--family neox --no-parallel-residual --pp 2 --layers-per-stage 1.5,2.5", {}),
    "one way to deal layers": ("--pp 2 --layers-per-stage 1,3 --first-stage-layers 1",
                               "--pp 2 --first-stage-layers 1", {}),
    "first and last stage": ("--pp 2 --first-stage-layers 3 --last-stage-layers 3",
                             "--pp 2 --first-stage-layers 3 --last-stage-layers 1", {}),
    "no empty stage": ("--pp 8", "--pp 8 --layers-per-stage 1,1,1,1,0,0,0,0", {}),
    "vpp needs pp": ("--vpp 2", "--vpp 2 --pp 2", {}),
    "vpp needs interleaved": ("--vpp 2 --pp 2 --schedule 1f1b", "--vpp 2 --pp 2 --schedule interleaved", {}),
    "interleaved needs vpp": ("--pp 2 --schedule interleaved", "--pp 2 --schedule gpipe", {}),
    "a schedule": ("--pp 2 --schedule 1f1bb", "--pp 2 --schedule zb-h1", {}),
    "a V has two stages": ("--num-layers 8 --pp 2 --vpp 3 --schedule zbv", "--pp 2 --schedule zbv", {}),
    "a table that fits": ("--pp 2 --schedule nowhere.csv", "--pp 2 --schedule v-min", {}),
    "a schedule to search": ("--pp 2 --schedule 1f1b --schedule-memory 2", "--pp 2 --schedule-memory 2", {}),
    "costs of the search": ("--pp 2 --schedule-memory 2 --schedule-costs 1,2",
                            "--pp 2 --schedule-memory 2 --schedule-costs 1,2,1", {}),
    "groups of microbatches": ("--pp 2 --microbatch-group 3", "--pp 2 --vpp 2 --microbatch-group 1", {}),
    "layout string": ("--pp 2 --pipeline-layout Et|ttL", "--pp 2 --pipeline-layout Et|tttL", {}),
    "kept of full recompute": ("--recompute-keep 1", "--recompute-keep 1 --recompute full", {}),
    "blocks of full recompute": ("--recompute-method block", "--recompute-method block --recompute full", {}),
    "shares of a unit's input": ("--distribute-saved-activations --recompute full",
                                 "--distribute-saved-activations --recompute full --tp 2", {}),
    "budget of activations": ("--activation-budget-gib 1 --recompute full", "--activation-budget-gib 1", {}),
    "offloaded blocks": ("--cpu-offloading-num-layers 2", "--cpu-offloading-num-layers 2 --cpu-offloading", {}),
    "shares or host memory": ("--cpu-offloading --recompute full --tp 2 --distribute-saved-activations",
                              "--cpu-offloading --recompute full --tp 2", {}),
    "chunks of an MLP": ("--mlp-chunks 2 --num-experts 4", "--mlp-chunks 2", {}),
    "modules of selective recompute": ("--recompute-modules mlp", "--recompute-modules mlp --recompute selective", {}),
    "units of full recompute": ("--recompute-num-layers 2", "--recompute-num-layers 2 --recompute full", {}),
    "world size": ("--tp 2 --dp 2", "--tp 2 --dp 4", {"world_size": 8}),
    "enough devices": ("--tp 4 --device auto", "--tp 2 --device auto", {"device_count": 2}),
    "a device": ("--device cuda", "--device auto", {}),
    "shards divide the ranks": ("--dp 4 --zero-shard-size 3", "--dp 4 --zero-shard-size 2", {}),
    "weights that come and go": ("--dp 2 --max-live-parameters 1000", "--dp 2 --max-live-parameters 1000 --zero 3", {}),
    "gradients that wait": ("--dp 2 --max-live-gradients 1000", "--dp 2 --max-live-gradients 1000 --zero 2", {}),
    "one word on sums": (f"--pp 2 --dp 2 --zero 2 --global-batch-size 6 --schedule {SUMS} --max-live-gradients 9",
                         f"--pp 2 --dp 2 --zero 2 --global-batch-size 6 --schedule {SUMS}", {}),
    "a share to offload": ("--optimizer-cpu-offload --optimizer-offload-fraction 1.5",
                           "--optimizer-cpu-offload --optimizer-offload-fraction 0.5", {}),
    "masters that can be offloaded": ("--optimizer-cpu-offload --master-remainders --dtype bfloat16",
                                      "--optimizer-cpu-offload --dtype bfloat16", {}),
    "files of what is offloaded": ("--offload-dir .", "--offload-dir . --cpu-offloading", {}),
    "files have a directory": ("--optimizer-cpu-offload --offload-dir-for state",
                               "--optimizer-cpu-offload --offload-dir . --offload-dir-for state", {}),
    "what goes to files": ("--optimizer-cpu-offload --offload-dir . --offload-dir-for tapes",
                           "--optimizer-cpu-offload --offload-dir . --offload-dir-for state", {}),
    "a directory to offload to": ("--optimizer-cpu-offload --offload-dir gone",
                                  "--optimizer-cpu-offload --offload-dir .", {}),
    "gradients that can be offloaded": (
        "--dp 2 --zero 2 --offload-gradients --optimizer-cpu-offload --optimizer muon",
        "--dp 2 --zero 2 --offload-gradients --optimizer-cpu-offload", {}),
    "weights that can be offloaded": ("--dp 2 --zero 3 --offload-weights",
                                      "--dp 2 --zero 3 --offload-weights --optimizer-cpu-offload", {}),
    "shards to be spread": ("--dp 4 --zero 0 --zero-shard-size 2", "--dp 4 --zero 2 --zero-shard-size 2", {}),
    "batch arithmetic": ("--global-batch-size 10 --micro-batch-size 2 --dp 2", "--global-batch-size 12 --dp 2", {}),
    "samples can be counted": ("--train-iters 99999999999999999999", "--train-iters 9999999", {}),
    "positions hold the sequence": ("--max-position-embeddings 64", "--max-position-embeddings 1024", {}),
    "a vocabulary": ("--vocab-size 0", "--vocab-size 0 --tokenizer-model t.json", {}),
    "vocabulary covers the tokenizer": ("--vocab-size 100", "--vocab-size 200", {"tokenizer_vocab": 200}),
    "vocabulary and merges": ("--vocab-file v", "--vocab-file v --merge-file m", {}),
    "tokenizer files": ("--tokenizer-model PATHS", "--tokenizer-model t.json", {}),
    "made up or read": ("--data-path corpus", "--no-mock-data --data-path corpus", {}),
    "ends of documents": ("--eod-mask-loss --reset-attention-mask", "--eod-mask-loss --tokenizer-model t.json", {}),
    "some data": ("--no-mock-data", "--no-mock-data --data-path corpus", {}),
    "data files": ("--no-mock-data --data-path 0.5 corpus 0.5 corpse",
                   "--no-mock-data --data-path 0.5 corpus 0.5 plain", {}),
    "batch ramp": ("--rampup-batch-size 3,2,100 --global-batch-size 8",
                   "--rampup-batch-size 4,2,100 --global-batch-size 8", {}),
    "several validation sets": ("--multiple-validation-sets", "--multiple-validation-sets --no-mock-data "
                                "--data-path corpus --valid-data-path corpus", {}),
    "ranges of samples": ("--skip-samples 9-3", "--skip-samples 3-9 20-20", {}),
    "tokens of fill-in-the-middle": ("--fim-cut tokens --fim-rate 0.5 --fim-token-ids 1,2",
                                     "--fim-cut tokens --fim-rate 0.5 --fim-token-ids 1,2,3", {}),
    "text of fill-in-the-middle": ("--fim-rate 0.5 --fim-token-ids 1,2,3",
                                   "--fim-rate 0.5 --fim-token-ids 1,2,3 --tokenizer-model t.json", {}),
    "packed rows": ("--pack-documents", "--pack-documents --no-mock-data --data-path corpus", {}),
    "split": ("--split 969,-1", "--split 90,10", {}),
    "words of parameter groups": ("--param-groups embed.*:lr=2", "--param-groups embed.*:lr_mult=2,optimizer=lion", {}),
    "muP": ("--mup-base-hidden-size 64 --optimizer sgd", "--mup-base-hidden-size 64 --optimizer muon", {}),
    "moments of adafactor": ("--optimizer adafactor --exp-avg-sq-dtype bfloat16", "--optimizer adafactor", {}),
    "sums of gradients": ("--main-grads-dtype bf16", "--main-grads-dtype bf16 --dtype bfloat16", {}),
    "remainders of bfloat16": ("--master-remainders", "--master-remainders --dtype bfloat16", {}),
    "warm-up before decay": ("--lr-warmup-iters 100", "--lr-warmup-iters 99", {}),
    "min_lr below lr": ("--lr 0.1 --min-lr 0.2", "--lr 0.1 --min-lr 0.1", {}),
    "warm-up starts below lr": ("--lr 0.1 --lr-warmup-init 0.2", "--lr-warmup-init 0", {}),
    "WSD has a decay": ("--lr-decay-style WSD", "--lr-decay-style WSD --lr-wsd-decay-iters 100", {}),
    "weight-decay ramp": ("--start-weight-decay 0", "--start-weight-decay 0 --weight-decay-incr-style cosine", {}),
    "loss scale of float16": ("--loss-scale 8", "--loss-scale 8 --dtype float16", {}),
    "local saves": ("--local-save /dev/shm/run", "--local-save /dev/shm/run --local-save-interval 10", {}),
    "ranks of a node": ("--local-save-ranks 3 --dp 2", "--local-save-ranks 2 --dp 2", {}),
    "kept beside the last": ("--keep-every 100", "--keep-every 100 --keep-last 2", {}),
    "faults on purpose": ("--inject kill@3:0 nan@2:1 burn@3:0", "--inject kill@3:0 kill-save@2:0", {}),
    "spikes stand out": ("--spike-factor 0.5", "--spike-factor 1.5", {}),
    "loss scale floor": ("--min-loss-scale 8 --initial-loss-scale 4", "--min-loss-scale 4 --initial-loss-scale 4", {}),
    "save is a directory": ("--save t.json", "--save elsewhere", {}),
    "local saves go elsewhere": ("--save runs/a --local-save runs/../runs/a --local-save-interval 1",
                                 "--save runs/a --local-save runs/b --local-save-interval 1", {}),
    "local_save is a directory": ("--local-save t.json --local-save-interval 1",
                                  "--local-save elsewhere --local-save-interval 1", {}),
    "fine-tuning needs weights": ("--finetune", "--finetune --load a", {}),
    "fine-tuning goes elsewhere": ("--finetune --load a --save a", "--finetune --load a --save b", {}),
    "W&B project": ("--wandb-exp-name a", "--wandb-exp-name a --wandb-project b", {}),
    "an encoder has something to read": ("--family t5 --seq-length 2", "--family t5 --seq-length 3", {}),
    "rows of the decoder are no accident": ("--family t5 --mask-prob 0.99", "--family t5 --mask-prob 0.85", {}),
    "the decoder starts with an id": ("--family t5 --vocab-size 99 --decoder-start-token-id 99",
                                      "--family t5 --vocab-size 99 --decoder-start-token-id 98", {}),
    "the decoder's rows hold what is masked": ("--family t5 --seq-length 512 --decoder-seq-length 113",
                                               "--family t5 --seq-length 512 --decoder-seq-length 114", {}),
    "tp divides the decoder's rows": ("--family t5 --tp 4 --sequence-parallel --decoder-seq-length 1022",
                                      "--family t5 --tp 4 --sequence-parallel", {}),
    "masked spans have an encoder": ("--mask-prob 0.3 --mean-span-length 2", "--family t5 --mask-prob 0.3", {}),
    "masked words have an encoder": ("--short-seq-prob 0.1 --mask-token-id 7",
                                     "--family bert --short-seq-prob 0.1", {}),
    "shares of masked words": ("--family bert --mask-replace-prob 0.8 --random-replace-prob 0.3",
                               "--family bert --mask-replace-prob 0.7 --random-replace-prob 0.3", {}),
    "the mask is an id": ("--family bert --mask-token-id 100", "--family bert --mask-token-id 99", {}),
    "rows of words hold some": ("--family bert --seq-length 3", "--family bert --seq-length 4 --mask-prob 0.3", {}),
    "masked words are one long stream": ("--family bert --fim-rate 0.5 --fim-token-ids 1,2,3 --fim-cut tokens",
                                         "--family bert --mask-prob 0.3", {}),
    "tasks and masked words": ("--family bert --eval-tasks lambada=x", "--eval-tasks lambada=x", {}),
    "pairs are no rows of documents": ("--family t5 --fim-rate 0.5 --fim-token-ids 1,2,3 --fim-cut tokens",
                                       "--family t5", {}),
    "tasks of decoders": ("--family t5 --eval-tasks lambada=x", "--eval-tasks lambada=x", {}),
    "cp with two streams": ("--family t5 --cp 2", "--cp 2", {}),
    "hybrid_context_parallel with two streams": ("--family t5 --hybrid-context-parallel --dp 2",
                                                 "--hybrid-context-parallel --dp 2", {}),
    "attention_backend with two streams": ("--family t5 --hidden-dropout 0 --attention-dropout 0 --attention-backend "
                                           "flash", "--family t5 --attention-backend unfused", {}),
    "cpu_offloading with two streams": ("--family t5 --cpu-offloading", "--cpu-offloading", {}),
    "distribute_saved_activations with two streams": (
        "--family t5 --tp 2 --recompute full --distribute-saved-activations",
        "--tp 2 --recompute full --distribute-saved-activations", {}),
    "activation_budget_gib with two streams": (
        "--family t5 --activation-budget-gib 1", "--activation-budget-gib 1", {}),
    "fp32_residual_connection with two streams": (
        "--family t5 --fp32-residual-connection --dtype bfloat16", "--fp32-residual-connection --dtype bfloat16", {}),
}  # fmt: skip
# rules whose fix is something to do outside of this command, or that the test's world does not have
OUTSIDE = ("data files", "tokenizer files", "tasks of decoders", "tasks and masked words")


def facts_of(extra):
    return Facts(exists=FILES.__contains__, is_file=FILES.__contains__, **extra)


def names_broken(line, extra):
    config = load(shlex.split(f"{BASE} {line}"))[0]
    found = broken(config, facts_of(extra))
    if any(r.broken(config, facts_of(extra)) for r in RANGES):
        return set(), found
    first = {r.name for r in FIRST[len(RANGES) :] if r.broken(config, facts_of(extra))}
    if first:
        return first, found
    finished = finish(config, extra.get("world_size"), extra.get("device_count", 0), extra.get("tokenizer_vocab", 0))
    return {r.name for r in RULES if r.broken(finished, facts_of(extra))}, found


def test_every_rule_is_in_the_table():
    assert len({r.name for r in RULES}) == len(RULES)
    assert {r.name for r in RULES} - {r.name for r in RANGES} == set(BOTH_SIDES)


def test_the_base_is_legal():
    assert names_broken("", {}) == (set(), [])


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_both_sides(name):
    bad, good, extra = BOTH_SIDES[name]
    assert names_broken(bad, extra)[0] == {name}
    assert names_broken(good, extra) == (set(), [])


def flags_in(text):
    """Options with their values at the start of a fix, up to the first comma or other word."""
    first = re.split(r", | or ", text)[0]
    found = re.findall(r"--[a-z0-9-]+(?: (?!--)[^ ]+)?", first)
    assert found and first.startswith("--"), f"the fix begins with no option: {text}"
    return " ".join(found)


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_every_message_names_options_and_a_value_that_works(name):
    bad, _, extra = BOTH_SIDES[name]
    _, (problem,) = names_broken(bad, extra)
    given = {w.split("=")[0] for w in bad.replace("--no-mock-data", "").split() if w.startswith("--")}
    assert given & set(re.findall(r"--[a-z0-9-]+", problem.asked)) or not given
    assert problem.case and problem.fix and "\n" not in str(problem).replace("\nbut:", "").replace("\ntry:", "")
    if name not in OUTSIDE:
        # --vocab-file vocab.json etc. name the user's own files: use those of this test's world
        fix = flags_in(problem.fix).replace("vocab.json", "v").replace("merges.txt", "m")
        assert names_broken(f"{bad} {fix}", extra) == (set(), []), fix


@pytest.mark.parametrize("rule", RANGES, ids=lambda r: r.name)
def test_ranges(rule):
    (leaf,) = rule.leaves
    flag = "--" + leaf.replace("_", "-")
    families = catalogue()[leaf].families
    whose = "" if not families or "llama" in families else f"--family {families[0]} "
    _, (problem,) = names_broken(f"{whose}{flag} -2", {})
    assert problem.asked.startswith(f"{flag} -2") and leaf in problem.case and problem.fix.startswith(flag)
    config = load(shlex.split(f"{BASE} {whose}{flag} -2 {problem.fix}"))[0]
    assert not rule.broken(config, Facts())


@pytest.mark.parametrize(("flag", "bad"), [("--hidden-dropout", "1.0"), ("--adam-beta2", "1"), ("--train-iters", "0"),
                                           ("--norm-epsilon", "0"), ("--lr-warmup-fraction", "1.5"), ("--tp", "0"),
                                           ("--start-weight-decay", "-0.5")])  # fmt: skip
def test_edges_of_ranges(flag, bad):
    (problem,) = names_broken(f"{flag} {bad}", {})[1]
    assert problem.asked.startswith(flag)


def test_all_problems_at_once_and_no_follow_ups():
    config = load(shlex.split("--hidden-size 66 --tp 0 --global-batch-size 10 --micro-batch-size 4 --dp 1 --split x"))[
        0
    ]
    text = "\n".join(map(str, check(config)))
    for part in (
        "--train-iters",
        "--tp 0",
        "--hidden-size 66",
        "4 x dp 1 = 4",
        "10 / 4 = 2.5",
        " 8 or",
        "12",
        "--split x",
    ):
        assert part in text
    assert text.count("--tp") == 2  # asked and try of the one problem about it
    assert check(config, skip=("tp", "split", "train_iters"))[0].asked.startswith("--hidden-size 66")


def test_finish_fills_what_follows():
    done = finish(
        load(shlex.split("--tp 2 --micro-batch-size 3 --seq-length 77 --device cpu --train-iters 50"))[0],
        vocab_size=123,
    )
    leaves = ("dp", "zero", "global_batch_size", "max_position_embeddings", "vocab_size", "lr_decay_iters")
    assert [value(done, leaf) for leaf in leaves] == [1, 0, 3, 77, 123, 50]
    assert finish(done) == done


@pytest.mark.parametrize(
    ("line", "world", "devices", "dp"),
    [
        ("--tp 2", 8, 0, 4),
        ("--tp 3", 8, 0, 2),
        ("--tp 2", None, 8, 4),
        ("--tp 2 --device cpu", None, 8, 1),
        ("--global-batch-size 6", None, 8, 6),
        ("--global-batch-size 7 --micro-batch-size 2", None, 8, 1),
        ("--tp 16", None, 8, 1),
        ("--dp 3", None, 8, 3),
    ],
)
def test_default_data_parallel_size(line, world, devices, dp):
    done = finish(load(shlex.split(line))[0], world, devices)
    assert done.layout.dp == dp and done.layout.zero == int(dp > 1)


def test_sequence_parallel_without_tensor_parallel_is_off():
    assert not finish(load(["--sequence-parallel"])[0]).layout.sequence_parallel
    assert finish(load(["--sequence-parallel", "--tp", "2"])[0]).layout.sequence_parallel


def test_the_defaults_lack_only_what_nobody_can_guess():
    assert {p.asked.split()[0] for p in check(RunConfig())} == {"--train-iters", "--vocab-size", "--data-path"}


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("--hidden-size 66", "--hidden-size 64 or 72, or --num-attention-heads 3 or 11"),
        ("--hidden-size 66 --family gpt", "--hidden-size 64 or 68, or --num-attention-heads 3 or 6"),
        ("--hidden-size 67", "--hidden-size 64 or 72"),
        ("--hidden-size 2 --num-attention-heads 3", "--hidden-size 6, or --num-attention-heads 1"),
    ],
)
def test_a_width_that_does_not_divide_names_the_nearest_that_do(line, fix):
    (problem,) = names_broken(line, {})[1]
    assert problem.fix == fix
    for way in fix.split(", or "):
        flag, _, values = way.partition(" ")
        for number in values.split(" or "):
            assert names_broken(f"{line} {flag} {number}", {}) == (set(), [])


def test_a_message_about_stages_names_only_what_was_given():
    (problem,) = names_broken("--pp 8", {})[1]
    assert problem.asked == "--num-layers 4 --pp 8" and problem.fix.startswith("--pp 4, or ask")
    assert "vpp" not in str(problem)
    (problem,) = names_broken("--pp 4 --vpp 2", {})[1]
    assert problem.asked == "--num-layers 4 --pp 4 --vpp 2" and "8 stages (2 on each of pp 4 ranks)" in problem.case


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("--num-experts 4 --ep 2", "--dp 2"),
        ("--num-experts 4 --ep 2 --tp 2", "--dp 2"),
        ("--layers-per-stage 1,3", "--pp 2"),
        ("--layers-per-stage 1,2", "--layers-per-stage 4"),
    ],
)
def test_ranks_that_were_not_asked_for_are_what_is_tried(line, fix):
    """What was typed stays as it was where more ranks make it work."""
    (problem,) = names_broken(line, {})[1]
    assert problem.fix == fix
    assert names_broken(f"{line} {fix}", {}) == (set(), [])


def test_a_v_with_too_few_layers_says_how_many_ranks_work():
    _, (problem,) = names_broken("--pp 4 --schedule v-min", {})
    assert problem.fix.startswith("--pp 2, or")
    assert names_broken("--pp 2 --schedule v-min", {}) == (set(), [])


SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "vocab_size", "make_vocab_size_divisible_by", "seq_length", "max_position_embeddings", "micro_batch_size",
         "global_batch_size", "train_iters", "tp", "pp", "vpp", "dp")  # fmt: skip


@pytest.mark.parametrize("leaf", SIZES)
@pytest.mark.parametrize("size", [10**23, 10**9 + 7])
def test_no_size_keeps_the_checks_busy(leaf, size):
    began = time.monotonic()
    config = load(shlex.split(f"{BASE} --tp 3 --vpp 2 --pp 7 {flag(leaf)} {size}"))[0]
    assert check(config)
    assert time.monotonic() - began < 20


def test_the_nearest_divisor():
    for n in range(1, 200):
        for near in (1, 2, 7, 100, 300):
            plain = min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: (abs(d - near), d))
            assert nearest_divisor(n, near) == plain
