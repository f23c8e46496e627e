"""Options that `generate` and `serve` share: how tokens are chosen, and how the engine works. PURE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isotron.config.argv import Parsed
from isotron.config.catalogue import Option
from isotron.core.errors import Problem
from isotron.inference.config import Beams, Ending, EngineConfig, Sampling, Wish

CHOICE = {
    o.name: o
    for o in (
        Option("top_k", "int", 0, "sample from the k likeliest tokens; 0 means all"),
        Option("top_p", "float", 0.0, "sample from the likeliest tokens that hold this probability; 0 means all"),
        Option("min_p", "float", 0.0, "sample from tokens with at least this share of the likeliest one's probability"),
        Option("repetition_penalty", "float", 1.0, "above 1: tokens of the prompt and the answer become less likely"),
        Option("presence_penalty", "float", 0.0, "subtracted from the logit of each token that the answer has"),
        Option("frequency_penalty", "float", 0.0, "subtracted from it as often as the answer has the token"),
        Option("logit_bias", "strs", (), "added to logits: ID:VALUE, several of them"),
        Option("stop", "strs", (), "text that ends an answer and is not part of it; repeat it for several"),
        Option("stop_ids", "ints", (), "tokens that end an answer, beside the end of a document"),
        Option("n", "int", 1, "answers per prompt"),
        Option("best_of", "int", 0, "of so many answers the n likeliest per token; 0 means n"),
        Option("logprobs", "int", 0, "alternatives to report at each token, with --json", unit="tokens"),
        Option("num_beams", "int", 1, "beams of a beam search; 1 means none"),
        Option("length_penalty", "float", 1.0, "beam search: scores are divided by length to this power"),
        Option("early_stopping", "bool", False, "beam search: end when num_beams answers are finished"),
        Option("json_schema", "str", "", "the answer is JSON of this schema: a file, or the schema itself"),
        Option("json_object", "bool", False, "the answer is a JSON object"),
        Option("regex", "str", "", "the answer matches this regular expression"),
    )
}
_DEFAULT = EngineConfig()
ENGINE = {
    o.name: o
    for o in (
        Option("max_batch", "int", _DEFAULT.rows, "sequences at work at once; others wait"),
        Option("page", "int", _DEFAULT.page, "tokens of a page of the cache", unit="tokens"),
        Option("chunk", "int", _DEFAULT.chunk, "tokens of one pass; longer prompts take several", unit="tokens"),
        Option("prefix_reuse", "bool", True, "sequences with the same beginning share its pages"),
        Option("speculate", "str", _DEFAULT.speculate, "guess tokens ahead, which changes none: auto (from the text so "
               "far, as long as it pays), none, ngram (from the text, always), draft, mtp (the model's own modules)",
               choices=("auto", "none", "ngram", "draft", "mtp")),
        Option("lookahead", "int", _DEFAULT.lookahead, "tokens guessed ahead; 0: up to 7 by auto, 4 by the others",
               unit="tokens"),
        Option("draft", "str", "", "a smaller model with the same tokenizer that guesses: a run, step or directory"),
    )
}  # fmt: skip


def settled(values: dict[str, Any], parsed: Parsed) -> list[Problem]:
    """Reads what has a form of its own into `values`: logit_bias, stop, grammar. Every problem of the values."""
    values["stop"] = tuple(" ".join(words) for words in parsed.repeated.get("stop", []))
    values["logit_bias"], problems = _biases(values["logit_bias"])
    values["grammar"], more = _grammar(values)
    choice = Sampling(**{n: values[n] for n in Sampling.__dataclass_fields__ if n in values})
    ending = Ending(values["max_new_tokens"], stop=values["stop"])
    wish = Wish(choice, ending, values["n"], values["best_of"], tops=values["logprobs"], grammar=values["grammar"])
    problems += more
    problems += wish.problems() if values["num_beams"] == 1 else [*choice.problems(), *ending.problems()]
    return [*problems, *_beams(values, wish), *engine_problems(values)]


def _beams(values: dict[str, Any], wish: Wish) -> list[Problem]:
    """Every problem of a beam search, where one is asked for."""
    beams, guesses = Beams(values["num_beams"], values["length_penalty"]), values["speculate"]
    if beams.count == 1:
        return []
    problems = beams.problems(wish)
    if guesses not in ("auto", "none"):
        case = "beams are extended one token at a time, without guesses"
        problems.append(Problem(f"--num-beams {beams.count} --speculate {guesses}", case, "--speculate none"))
    return problems


def engine_problems(values: dict[str, Any]) -> list[Problem]:
    """Every problem of the engine's options."""
    names = ("max_batch", "page", "chunk", "prefix_reuse", "speculate", "lookahead")
    problems = EngineConfig(*(values[n] for n in names)).problems()
    drafts = values["speculate"] == "draft"
    if drafts != bool(values["draft"]):
        asked = f"--speculate {values['speculate']} --draft {values['draft'] or '(not given)'}"
        case = "a draft model guesses when both are given"
        problems.append(Problem(asked, case, "--speculate draft --draft DIR, or neither"))
    return problems


def _biases(words: tuple[str, ...]) -> tuple[tuple[tuple[int, float], ...], list[Problem]]:
    found = []
    for word in (part for w in words for part in w.split(",") if part):
        token, _, value = word.partition(":")
        try:
            found.append((int(token), float(value)))
        except ValueError:
            return (), [Problem(f"--logit-bias {word}", "it is not ID:VALUE", "--logit-bias 50256:-100")]
    return tuple(found), []


def _grammar(values: dict[str, Any]) -> tuple[tuple[str, str] | None, list[Problem]]:
    schema = values["json_schema"]
    if schema and not schema.lstrip().startswith("{"):
        path = Path(schema)
        if not path.is_file():
            return None, [Problem(f"--json-schema {schema}", "there is no such file", "--json-schema schema.json")]
        try:
            schema = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            return None, [Problem(f"--json-schema {schema}", f"it is not UTF-8: {error.reason}", "a JSON file")]
    kinds = (("json_schema", schema), ("json", values["json_object"] and "{}"), ("regex", values["regex"]))
    given = [(kind, str(text)) for kind, text in kinds if text]
    if len(given) > 1:
        asked = " and ".join(f"--{kind.replace('_', '-')}" for kind, _ in given)
        return None, [Problem(asked, "an answer follows one grammar", "one of them")]
    return (given[0] if given else None), []
