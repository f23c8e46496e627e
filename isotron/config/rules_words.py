"""Rules on families that see whole rows and fill in masked words: shares, the mask, what rows of others have. PURE."""

from __future__ import annotations

from isotron.config.catalogue import catalogue
from isotron.config.rules import Facts, Rule, asked, flag, moved
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem

SHORTEST = 4  # two words, a token before and one behind them
_WORDS = ("mask_replace_prob", "random_replace_prob", "mask_token_id", "short_seq_prob")
_OTHERS = ("eod_mask_loss", "pack_documents", "fim_rate")


def fills_words(c: RunConfig) -> bool:
    """Whether the family sees whole rows and says what stood where words are masked."""
    return not getattr(c.model, "causal", True)


def _strange(c: RunConfig, f: Facts) -> Problem:
    given = moved(c, *_WORDS)
    case = f"words are masked for families that see whole rows (bert), and {c.model.family} is none"
    return Problem(asked(c, *given), case, " ".join(f"{flag(leaf)} {catalogue()[leaf].default}" for leaf in given))


def _shares(c: RunConfig, f: Facts) -> Problem:
    case = "of the words that are masked the mask stands for a share, any word for another, and the rest stays"
    fix = "--mask-replace-prob 0.8 --random-replace-prob 0.1"
    return Problem(asked(c, "mask_replace_prob", "random_replace_prob"), case, fix)


def _vocabulary(c: RunConfig, f: Facts) -> int:
    return c.model.vocab_size or f.tokenizer_vocab


def _mask_id(c: RunConfig, f: Facts) -> Problem:
    case = f"the vocabulary has the ids 0 to {_vocabulary(c, f) - 1}"
    return Problem(asked(c, "mask_token_id"), case, "--mask-token-id -1, which takes the tokenizer's")


def _shortest(c: RunConfig, f: Facts) -> Problem:
    case = f"a row is two words, a token before and one behind them at least: {SHORTEST} tokens"
    return Problem(asked(c, "seq_length"), case, "--seq-length 512")


def _rows_of_decoders(c: RunConfig, f: Facts) -> Problem:
    given = moved(c, *_OTHERS)
    case = f"family {c.model.family} reads rows with masked words, cut from one long stream of documents"
    off = " ".join("--fim-rate 0" if leaf == "fim_rate" else f"--no-{leaf.replace('_', '-')}" for leaf in given)
    return Problem(asked(c, *given), case, off)


def _tasks(c: RunConfig, f: Facts) -> Problem:
    case = f"tasks ask a decoder for the likelihood of texts, and {c.model.family} fills in words"
    return Problem(asked(c, "eval_tasks"), case, "leave it out")


WORD_RULES: tuple[Rule, ...] = (
    Rule("masked words have an encoder", _WORDS, lambda c, f: not fills_words(c) and bool(moved(c, *_WORDS)), _strange),
    Rule("shares of masked words", ("mask_replace_prob", "random_replace_prob"),
         lambda c, f: fills_words(c) and c.data.mask_replace_prob + c.data.random_replace_prob > 1 + 1e-9, _shares),
    Rule("the mask is an id", ("mask_token_id", "vocab_size"),
         lambda c, f: fills_words(c) and 0 < _vocabulary(c, f) <= c.data.mask_token_id, _mask_id),
    Rule("rows of words hold some", ("seq_length",),
         lambda c, f: fills_words(c) and c.data.seq_length < SHORTEST, _shortest),
    Rule("masked words are one long stream", _OTHERS,
         lambda c, f: fills_words(c) and bool(moved(c, *_OTHERS)), _rows_of_decoders),
    Rule("tasks and masked words", ("eval_tasks",), lambda c, f: fills_words(c) and bool(c.train.eval_tasks), _tasks),
)  # fmt: skip
