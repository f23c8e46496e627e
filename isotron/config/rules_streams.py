"""Rules on families with an encoder and a decoder: masked spans, rows of both, what one alone has. PURE."""

from __future__ import annotations

from isotron.config.rules import Facts, Rule, asked, flag, moved
from isotron.config.schema import RunConfig, value
from isotron.core.errors import Problem, Refused
from isotron.data.spans import plan

SHORTEST = 3  # a token, a sentinel, the end
LONGEST = 4  # a row of the decoder, in rows of the encoder, that nobody has to confirm
_MASKS = ("mask_prob", "mean_span_length", "sentinel_ids")
_ONE_STREAM = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "pack_documents", "fim_rate")


def two_streams(c: RunConfig) -> bool:
    """Whether the family has an encoder and a decoder."""
    return bool(getattr(c.model, "two_streams", False))


def _shortest(c: RunConfig, f: Facts) -> Problem:
    case = f"what an encoder reads is a token, a sentinel and an end at least: {SHORTEST} tokens"
    return Problem(asked(c, "seq_length"), case, "--seq-length 512")


def _target(c: RunConfig) -> int:
    return plan(c.data.seq_length, c.data.mask_prob, c.data.mean_span_length).target


def _decoder_rows(c: RunConfig, f: Facts) -> Problem:
    needed = _target(c)
    case = f"what is masked of {c.data.seq_length} tokens comes to {needed} with its sentinels and the end"
    leaves = ("decoder_seq_length", "seq_length", *moved(c, "mask_prob", "mean_span_length"))
    return Problem(asked(c, *leaves), case, "--decoder-seq-length 0, which takes as many as are needed")


def _long_rows(c: RunConfig, f: Facts) -> Problem:
    needed = _target(c)
    case = f"what is masked comes to rows of {needed} tokens for the decoder, {needed / c.data.seq_length:.0f} times "
    case += f"the encoder's {c.data.seq_length}"
    fix = f"--mask-prob 0.15, or --decoder-seq-length {needed} where rows so long are meant"
    return Problem(asked(c, *moved(c, "mask_prob", "mean_span_length"), "seq_length"), case, fix)


def _decoder_parts(c: RunConfig, f: Facts) -> Problem:
    rows, tp = value(c, "decoder_seq_length"), c.layout.tp
    case = f"sequence parallelism splits the decoder's rows over tp {tp} ranks too, and {rows} / {tp} = {rows / tp:g}"
    fix = f"--decoder-seq-length {-(-rows // tp) * tp}, or --no-sequence-parallel"
    return Problem(asked(c, "sequence_parallel", "tp", "decoder_seq_length"), case, fix)


def _vocabulary(c: RunConfig, f: Facts) -> int:
    return c.model.vocab_size or f.tokenizer_vocab


def _starts(c: RunConfig, f: Facts) -> Problem:
    case = f"the vocabulary has the ids 0 to {_vocabulary(c, f) - 1}"
    return Problem(asked(c, "decoder_start_token_id"), case, "--decoder-start-token-id 0")


def _strange(c: RunConfig) -> tuple[str, ...]:
    """Options of masks that were given and that the family has none of; words of a row are masked too (BERT)."""
    words = not getattr(c.model, "causal", True)
    return () if two_streams(c) else moved(c, *(leaf for leaf in _MASKS if not (words and leaf == "mask_prob")))


def _masks(c: RunConfig, f: Facts) -> Problem:
    case = f"spans are masked for families with an encoder and a decoder, and {c.model.family} is none"
    given = _strange(c)
    defaults = {"mask_prob": "0.15", "mean_span_length": "3.0"}
    back = [f"{flag(leaf)} {defaults[leaf]}" for leaf in given if leaf in defaults]
    return Problem(asked(c, *given), case, " ".join(back) or "--family t5")


def _rows_of_decoders(c: RunConfig, f: Facts) -> Problem:
    case = f"family {c.model.family} reads pairs with masked spans, cut from one long stream of documents"
    given = moved(c, *_ONE_STREAM)
    off = " ".join("--fim-rate 0" if leaf == "fim_rate" else f"--no-{leaf.replace('_', '-')}" for leaf in given)
    return Problem(asked(c, *given), case, off)


def _tasks(c: RunConfig, f: Facts) -> Problem:
    case = f"tasks ask a decoder for the likelihood of texts, and {c.model.family} has an encoder too"
    return Problem(asked(c, "eval_tasks"), case, "leave it out")


def _layout_rule(leaf: str) -> Rule:
    """What the family itself says against one option of the layout."""

    def found(c: RunConfig) -> list[Problem]:
        try:
            getattr(c.model, "check_layout", lambda layout: None)(c.layout)
        except Refused as refused:
            return [p for p in refused.problems if p.asked.split()[0] == flag(leaf)]
        return []

    return Rule(f"{leaf} with two streams", (leaf,), lambda c, f: bool(found(c)), lambda c, f: found(c)[0])


SHORTEST_RULE = Rule("an encoder has something to read", ("seq_length",),
                     lambda c, f: two_streams(c) and c.data.seq_length < SHORTEST, _shortest)  # fmt: skip
# looked at before the decoder's rows are filled in: who gives their length means it
LONG_RULE = Rule("rows of the decoder are no accident",
                 ("mask_prob", "mean_span_length", "seq_length", "decoder_seq_length"),
                 lambda c, f: two_streams(c) and not value(c, "decoder_seq_length")
                 and _target(c) > LONGEST * c.data.seq_length, _long_rows)  # fmt: skip
STREAM_RULES: tuple[Rule, ...] = (
    Rule("the decoder's rows hold what is masked",
         ("decoder_seq_length", "seq_length", "mask_prob", "mean_span_length"),
         lambda c, f: two_streams(c) and value(c, "decoder_seq_length") < _target(c), _decoder_rows),
    Rule("tp divides the decoder's rows", ("sequence_parallel", "tp", "decoder_seq_length"),
         lambda c, f: two_streams(c) and c.layout.sequence_parallel
         and value(c, "decoder_seq_length") % c.layout.tp != 0, _decoder_parts),
    Rule("the decoder starts with an id", ("decoder_start_token_id", "vocab_size"),
         lambda c, f: two_streams(c) and 0 < _vocabulary(c, f) <= value(c, "decoder_start_token_id"), _starts),
    Rule("masked spans have an encoder", _MASKS, lambda c, f: bool(_strange(c)), _masks),
    Rule("pairs are no rows of documents", _ONE_STREAM,
         lambda c, f: two_streams(c) and bool(moved(c, *_ONE_STREAM)), _rows_of_decoders),
    Rule("tasks of decoders", ("eval_tasks",), lambda c, f: two_streams(c) and bool(c.train.eval_tasks), _tasks),
    *map(_layout_rule, ("cp", "hybrid_context_parallel", "attention_backend", "cpu_offloading", "activation_budget_gib",
                        "distribute_saved_activations", "fp32_residual_connection")),
)  # fmt: skip
