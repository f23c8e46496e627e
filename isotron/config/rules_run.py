"""Rules on batches, schedules, data and tokenizer files. PURE; files are looked at through the facts."""

from __future__ import annotations

import os

from isotron.config.fault_words import KINDS, Fault
from isotron.config.rules import Facts, Rule, asked, moved
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem
from isotron.core.optim.groups import parse
from isotron.tokenizers.config import DESCRIPTOR


def _batch(c: RunConfig, f: Facts) -> Problem:
    micro, dp, batch = c.train.micro_batch_size, c.layout.dp, c.train.global_batch_size
    unit = micro * dp
    below, above = batch // unit * unit, -(-batch // unit) * unit
    near = [n for n in (below, above) if n > 0]
    arithmetic = f"micro_batch_size {micro} x dp {dp} = {unit} sequences"
    case = f"a step is made of {arithmetic} at a time, and {batch} / {unit} = {batch / unit:g}"
    fix = " or ".join(f"--global-batch-size {n}" for n in near)
    return Problem(asked(c, "global_batch_size", "micro_batch_size", "dp"), case, fix)


def _samples(c: RunConfig, f: Facts) -> Problem:
    batch = c.train.global_batch_size
    case = f"train_iters x global_batch_size = {c.train.train_iters * batch:.3g} samples; they are counted to 2^53"
    return Problem(asked(c, "train_iters", "global_batch_size"), case, "--train-iters 1000 --global-batch-size 128")


def _positions(c: RunConfig, f: Facts) -> Problem:
    s, limit = c.data.seq_length, c.model.max_position_embeddings
    fix = f"--max-position-embeddings {s}, or --seq-length {limit}"
    return Problem(
        asked(c, "seq_length", "max_position_embeddings"), f"the model has {limit} positions, a sequence {s}", fix
    )


def _has_tokenizer(c: RunConfig) -> bool:
    t = c.tokenizer
    return bool(t.tokenizer_model or t.vocab_file or t.merge_file)


def _vocab(c: RunConfig, f: Facts) -> Problem:
    case = "the size of the vocabulary comes from the tokenizer, and no tokenizer file is given"
    return Problem(
        asked(c, "vocab_size"), case, "--vocab-size 50257, or --vocab-file vocab.json --merge-file merges.txt"
    )


def _vocab_covers(c: RunConfig, f: Facts) -> Problem:
    if f.own_tokenizer:
        sizes = f"the tokenizer has {f.tokenizer_vocab} entries and the checkpoint's model {c.model.vocab_size}"
        case = f"{sizes}: the run began with another one"
        return Problem(asked(c, *moved(c, *_FILES), "load"), case, own_copy(f.own_tokenizer))
    case = f"the tokenizer has {f.tokenizer_vocab} entries, the model would have {c.model.vocab_size}"
    return Problem(asked(c, "vocab_size"), case, f"--vocab-size {f.tokenizer_vocab}, or leave it out")


def _is_wordpiece(c: RunConfig) -> bool:
    """Whether the vocabulary is a vocab.txt, which stands alone."""
    t = c.tokenizer
    named = t.tokenizer_type.startswith("BertWordPiece") or (
        t.tokenizer_type == "auto" and t.vocab_file.endswith(".txt")
    )
    return named and not t.merge_file


def _bpe_pair(c: RunConfig, f: Facts) -> Problem:
    case = "a byte-level BPE is two files that belong together"
    given = "vocab_file" if c.tokenizer.vocab_file else "merge_file"
    return Problem(asked(c, given), case, "--vocab-file vocab.json --merge-file merges.txt")


def own_copy(path: str) -> str:
    """What to say of a tokenizer that is not what it was when the checkpoint was written, where its copy is."""
    return f"--tokenizer-model {path}, the copy that is in the checkpoint"


def _missing_tokenizer(c: RunConfig, f: Facts) -> list[str]:
    if c.tokenizer.tokenizer_model and f.exists(os.path.join(c.tokenizer.tokenizer_model, DESCRIPTOR)):
        return []  # a checkpoint's copy needs no other file
    return [leaf for leaf in ("tokenizer_model", "vocab_file", "merge_file")
            if getattr(c.tokenizer, leaf) and not f.exists(getattr(c.tokenizer, leaf))]  # fmt: skip


def _tokenizer_files(c: RunConfig, f: Facts) -> Problem:
    missing = _missing_tokenizer(c, f)
    paths = f"{' '.join('--' + m.replace('_', '-') + ' PATH' for m in missing)} with the path of a local file"
    fix = own_copy(f.own_tokenizer) if f.own_tokenizer else paths
    return Problem(asked(c, *missing), "there is no such file; nothing is downloaded", fix)


def _no_data(c: RunConfig, f: Facts) -> Problem:
    case = "training reads a .bin/.idx pair, and none is given"
    return Problem(
        "--data-path not given",
        case,
        "--mock-data, to try a layout, or --data-path PREFIX written by isotron preprocess",
    )


def _made_up_and_read(c: RunConfig, f: Facts) -> Problem:
    case = "data is either made up or read, and both are asked for"
    given = [leaf for leaf in ("data_path", "valid_data_path") if getattr(c.data, leaf)]
    return Problem(asked(c, "mock_data", *given), case, "--no-mock-data, or leave the data paths out")


_DOCUMENTS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


def _no_documents(c: RunConfig, f: Facts) -> Problem:
    given = [leaf for leaf in _DOCUMENTS if getattr(c.data, leaf)]
    case = "documents end with a tokenizer's end-of-document id, and made-up data without a tokenizer has none"
    fix = " ".join(f"--no-{leaf.replace('_', '-')}" for leaf in given)
    return Problem(asked(c, *given), case, f"{fix}, or --tokenizer-model with a local file")


def data_prefixes(words: tuple[str, ...]) -> list[str]:
    """The prefixes of `prefix` or `weight prefix weight prefix ...`."""
    return [w for w in words if not _is_number(w)] if len(words) > 1 else list(words)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _missing_data(c: RunConfig, f: Facts) -> list[str]:
    prefixes = data_prefixes(c.data.data_path) + data_prefixes(c.data.valid_data_path)
    return [p for p in prefixes if not any(_pair(f, p + end) for end in ("", "_text_document"))]


def _pair(f: Facts, prefix: str) -> bool:
    base = prefix.removesuffix(".bin").removesuffix(".idx")
    return f.exists(base + ".bin") and f.exists(base + ".idx")


def _data_files(c: RunConfig, f: Facts) -> Problem:
    missing = _missing_data(c, f)
    case = f"there is no pair {missing[0]}.bin, {missing[0]}.idx, nor {missing[0]}_text_document.bin, .idx"
    fix = f"isotron preprocess --input TEXT.jsonl --output-prefix {missing[0]} writes them"
    return Problem(f"--data-path {' '.join(missing)}", case, fix)


def _split_broken(c: RunConfig, f: Facts) -> bool:
    parts = c.data.split.split(",")
    if not 1 <= len(parts) <= 3 or not all(_is_number(p) for p in parts):
        return True
    return any(float(p) < 0 for p in parts) or not float(parts[0]) > 0


def _split(c: RunConfig, f: Facts) -> Problem:
    case = "a split is up to three parts (training, validation, test) of 0 or more, the first above 0"
    return Problem(asked(c, "split"), case, "--split 969,30,1")


def _decay(c: RunConfig) -> int:
    return c.schedule.lr_decay_iters or c.train.train_iters


def _warmup(c: RunConfig, f: Facts) -> Problem:
    steps = _decay(c)
    case = f"warm-up must end before the decay does, at step {steps} (lr_decay_iters, or else train_iters)"
    fix = f"--lr-warmup-iters {steps // 10}"
    return Problem(asked(c, "lr_warmup_iters", "lr_decay_iters", "train_iters"), case, fix)


def _min_lr(c: RunConfig, f: Facts) -> Problem:
    return Problem(asked(c, "min_lr", "lr"), "the lowest learning rate is above the highest", "--min-lr 0.0")


def _warmup_init(c: RunConfig, f: Facts) -> Problem:
    return Problem(
        asked(c, "lr_warmup_init", "lr"), "warm-up would start above the highest rate", "--lr-warmup-init 0.0"
    )


def _wsd(c: RunConfig, f: Facts) -> Problem:
    steps = _decay(c)
    case = f"WSD decays over its last lr_wsd_decay_iters steps, which must be 1 to {steps}"
    return Problem(
        asked(c, "lr_decay_style", "lr_wsd_decay_iters"), case, f"--lr-wsd-decay-iters {max(1, steps // 10)}"
    )


def _ramp_broken(c: RunConfig, f: Facts) -> bool:
    s = c.schedule
    start, end = (s.weight_decay if w == -1 else w for w in (s.start_weight_decay, s.end_weight_decay))
    return s.weight_decay_incr_style == "constant" and start != end


def _ramp(c: RunConfig, f: Facts) -> Problem:
    case = "a constant weight decay has the same value at start and end"
    leaves = ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay", "weight_decay")
    return Problem(asked(c, *leaves), case, "--weight-decay-incr-style linear, or --weight-decay alone")


def _loss_scale(c: RunConfig, f: Facts) -> Problem:
    return Problem(
        asked(c, "loss_scale", "dtype"), "only float16 scales the loss", "--loss-scale 0, or --dtype float16"
    )


def _loss_scale_floor(c: RunConfig, f: Facts) -> Problem:
    case = "the first loss scale is below the lowest"
    return Problem(
        asked(c, "min_loss_scale", "initial_loss_scale"), case, f"--min-loss-scale {c.optim.initial_loss_scale}"
    )


def _group_words(c: RunConfig) -> list[Problem]:
    return [found for found in map(parse, c.optim.param_groups) if isinstance(found, Problem)]


def _remainders(c: RunConfig, f: Facts) -> Problem:
    case = "a remainder is what a bfloat16 weight lacks of its float32 master"
    return Problem(asked(c, "master_remainders", "dtype"), case, "--no-master-remainders, or --dtype bfloat16")


def _adafactor(c: RunConfig, f: Facts) -> Problem:
    case = "adafactor has no first moments, and of second moments a mean of each row and column, which stay wide"
    fix = "--exp-avg-dtype float32 --exp-avg-sq-dtype float32"
    return Problem(asked(c, "optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"), case, fix)


def _mup(c: RunConfig, f: Facts) -> Problem:
    case = "muP gives the output layer other initial weights and rates than the embedding; it has no rule for sgd, nor "
    case += "for adafactor, whose updates follow the size of weights"
    fix = "--no-tie-embeddings --optimizer adamw"
    return Problem(asked(c, "mup_base_hidden_size", "tie_embeddings", "optimizer"), case, fix)


def _bad_faults(c: RunConfig) -> list[str]:
    return [word for word in c.faults.inject if not _is_fault(word, c.layout.world)]


def _is_fault(word: str, world: int) -> bool:
    try:
        return Fault.parse(word).rank < world
    except ValueError:
        return False


def _faults(c: RunConfig, f: Facts) -> Problem:
    case = f"a fault is KIND@STEP:RANK, the kinds are {', '.join(KINDS)}"
    case += f", steps count from 1, ranks from 0 to {c.layout.world - 1}"
    return Problem(f"--inject {' '.join(_bad_faults(c))}", case, "--inject kill@10:0")


def _spike(c: RunConfig, f: Facts) -> Problem:
    case = "a spike is a multiple above 1 of the mean of recent losses"
    return Problem(asked(c, "spike_factor"), case, "--spike-factor 3.0")


def _wandb(c: RunConfig, f: Facts) -> Problem:
    return Problem(asked(c, "wandb_exp_name"), "a run's name needs a project to stand in", "--wandb-project isotron")


def _bad_rampup(c: RunConfig) -> bool:
    sizes = c.train.rampup_batch_size
    if len(sizes) != 3 or min(sizes) < 1 or sizes[0] > c.train.global_batch_size:
        return True
    unit = c.train.micro_batch_size * c.layout.dp
    return any(n % unit for n in sizes[:2]) or (c.train.global_batch_size - sizes[0]) % sizes[1] != 0


def _rampup(c: RunConfig, f: Facts) -> Problem:
    unit, whole = c.train.micro_batch_size * c.layout.dp, c.train.global_batch_size
    case = (
        f"it is START,INCREMENT,SAMPLES above 0: START and INCREMENT in steps of micro_batch_size x dp = {unit}, "
        f"increments that lead from START to {whole} exactly"
    )
    leaves = ("rampup_batch_size", "global_batch_size", "micro_batch_size", "dp")
    return Problem(asked(c, *leaves), case, f"--rampup-batch-size {whole},{unit},1000")


def _no_sets(c: RunConfig, f: Facts) -> Problem:
    case = "the sets are the prefixes of valid_data_path, and it is empty"
    return Problem(
        asked(c, "multiple_validation_sets"), case, "--no-multiple-validation-sets, or --valid-data-path A B"
    )


def _bad_skips(c: RunConfig) -> bool:
    pairs = [word.split("-") for word in c.train.skip_samples]
    return any(len(p) != 2 or not all(n.isdecimal() for n in p) or int(p[0]) > int(p[1]) for p in pairs)


def _skips(c: RunConfig, f: Facts) -> Problem:
    case = "a range is FIRST-LAST, places in consumption order as metrics.jsonl has them in sample_ids"
    return Problem(asked(c, "skip_samples"), case, "--skip-samples 1000-1999")


def _bad_fim(c: RunConfig) -> bool:
    ids = c.data.fim_token_ids
    return c.data.fim_rate > 0 and (len(ids) != 3 or len(set(ids)) != 3 or min(ids) < 0)


def _fim(c: RunConfig, f: Facts) -> Problem:
    case = "fill-in-the-middle takes the ids of the prefix, middle and suffix token: three different ones"
    return Problem(asked(c, "fim_rate", "fim_token_ids"), case, "--fim-token-ids 100258,100259,100260")


def _no_text(c: RunConfig, f: Facts) -> Problem:
    case = "without a tokenizer there is no text to be cut between characters"
    return Problem(asked(c, "fim_rate", "fim_cut"), case, "--fim-cut tokens, or --tokenizer-model FILE")


def _packed_stream(c: RunConfig, f: Facts) -> Problem:
    given = [leaf for leaf in (*_DOCUMENTS, "mock_data") if getattr(c.data, leaf)] + ["fim_rate"] * bool(
        c.data.fim_rate
    )
    case = "packed rows are whole documents that are isolated already, and read from files"
    fix = "--no-pack-documents"
    return Problem(asked(c, "pack_documents", *given), case, fix)


_RAMP = ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay", "weight_decay")
_FILES = ("tokenizer_model", "vocab_file", "merge_file")

RUN_RULES: tuple[Rule, ...] = (
    Rule("batch arithmetic", ("global_batch_size", "micro_batch_size", "dp"),
         lambda c, f: c.train.global_batch_size % (c.train.micro_batch_size * c.layout.dp) != 0, _batch),
    Rule("samples can be counted", ("train_iters", "global_batch_size"),
         lambda c, f: c.train.train_iters * c.train.global_batch_size > 2**53, _samples),
    Rule("positions hold the sequence", ("seq_length", "max_position_embeddings"),
         lambda c, f: c.data.seq_length > c.model.max_position_embeddings, _positions),
    Rule("a vocabulary", ("vocab_size", *_FILES),
         lambda c, f: c.model.vocab_size == 0 and not _has_tokenizer(c) and not f.tokenizer_vocab, _vocab),
    Rule("vocabulary covers the tokenizer", ("vocab_size",),
         lambda c, f: 0 < c.model.vocab_size < f.tokenizer_vocab, _vocab_covers),
    Rule("vocabulary and merges", _FILES,
         lambda c, f: bool(c.tokenizer.vocab_file) != bool(c.tokenizer.merge_file) and not _is_wordpiece(c), _bpe_pair),
    Rule("tokenizer files", _FILES, lambda c, f: bool(_missing_tokenizer(c, f)), _tokenizer_files),
    Rule("some data", ("data_path", "mock_data"), lambda c, f: not c.data.data_path and not c.data.mock_data, _no_data),
    Rule("made up or read", ("mock_data", "data_path", "valid_data_path"),
         lambda c, f: c.data.mock_data and bool(c.data.data_path or c.data.valid_data_path), _made_up_and_read),
    Rule("ends of documents", (*_DOCUMENTS, "mock_data", *_FILES),
         lambda c, f: c.data.mock_data and not _has_tokenizer(c) and any(getattr(c.data, x) for x in _DOCUMENTS),
         _no_documents),
    Rule("batch ramp", ("rampup_batch_size", "global_batch_size", "micro_batch_size", "dp"),
         lambda c, f: bool(c.train.rampup_batch_size) and _bad_rampup(c), _rampup),
    Rule("several validation sets", ("multiple_validation_sets", "valid_data_path"),
         lambda c, f: c.data.multiple_validation_sets and not c.data.valid_data_path, _no_sets),
    Rule("ranges of samples", ("skip_samples",), lambda c, f: _bad_skips(c), _skips),
    Rule("tokens of fill-in-the-middle", ("fim_rate", "fim_token_ids"), lambda c, f: _bad_fim(c), _fim),
    Rule("text of fill-in-the-middle", ("fim_rate", "fim_cut", *_FILES, "tokenizer_type"),
         lambda c, f: c.data.fim_rate > 0 and c.data.fim_cut == "characters" and not _has_tokenizer(c)
         and c.tokenizer.tokenizer_type != "NullTokenizer", _no_text),
    Rule("packed rows", ("pack_documents", *_DOCUMENTS, "mock_data", "fim_rate"),
         lambda c, f: c.data.pack_documents
         and (any(getattr(c.data, x) for x in (*_DOCUMENTS, "mock_data")) or c.data.fim_rate > 0), _packed_stream),
    Rule("data files", ("data_path", "valid_data_path"),
         lambda c, f: not c.data.mock_data and bool(_missing_data(c, f)), _data_files),
    Rule("split", ("split",), _split_broken, _split),
    Rule("warm-up before decay", ("lr_warmup_iters", "lr_decay_iters", "train_iters"),
         lambda c, f: 0 < _decay(c) <= c.schedule.lr_warmup_iters, _warmup),
    Rule("min_lr below lr", ("min_lr", "lr"), lambda c, f: c.schedule.min_lr > c.schedule.lr, _min_lr),
    Rule("warm-up starts below lr", ("lr_warmup_init", "lr"),
         lambda c, f: c.schedule.lr_warmup_init > c.schedule.lr, _warmup_init),
    Rule("WSD has a decay", ("lr_decay_style", "lr_wsd_decay_iters", "lr_decay_iters", "train_iters"),
         lambda c, f: c.schedule.lr_decay_style == "WSD" and not 0 < c.schedule.lr_wsd_decay_iters <= _decay(c), _wsd),
    Rule("weight-decay ramp", _RAMP, _ramp_broken, _ramp),
    Rule("loss scale of float16", ("loss_scale", "dtype"),
         lambda c, f: c.optim.loss_scale > 0 and c.train.dtype != "float16", _loss_scale),
    Rule("loss scale floor", ("min_loss_scale", "initial_loss_scale"),
         lambda c, f: c.optim.min_loss_scale > c.optim.initial_loss_scale, _loss_scale_floor),
    Rule("words of parameter groups", ("param_groups",),
         lambda c, f: bool(_group_words(c)), lambda c, f: _group_words(c)[0]),
    Rule("muP", ("mup_base_hidden_size", "tie_embeddings", "optimizer", "muon_others"),
         lambda c, f: c.optim.mup_base_hidden_size > 0
         and (getattr(c.model, "tie_embeddings", False)
              or bool({"sgd", "adafactor"} & {c.optim.optimizer, c.optim.muon_others})), _mup),
    Rule("moments of adafactor", ("optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"),
         lambda c, f: c.optim.optimizer == "adafactor"
         and {c.optim.exp_avg_dtype, c.optim.exp_avg_sq_dtype} != {"float32"}, _adafactor),
    Rule("remainders of bfloat16", ("master_remainders", "dtype"),
         lambda c, f: c.optim.master_remainders and c.train.dtype != "bfloat16", _remainders),
    Rule("faults on purpose", ("inject",), lambda c, f: bool(_bad_faults(c)), _faults),
    Rule("spikes stand out", ("spike_factor",),
         lambda c, f: c.faults.spike_factor != 0 and not c.faults.spike_factor > 1, _spike),
    Rule("W&B project", ("wandb_project", "wandb_exp_name"),
         lambda c, f: bool(c.log.wandb_exp_name) and not c.log.wandb_project, _wandb),
)  # fmt: skip
