"""One rank of `isotron generate`: from a checkpoint to printed texts.

Called in place for one process, by `launch.run_local` or by a launcher for several; it tears down what it starts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isotron.config.load import read
from isotron.config.resume import find_checkpoint
from isotron.config.schema import RunConfig, changed, from_dict
from isotron.core import device as devices
from isotron.core.checkpoint.format import Manifest, read_manifest
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.weights import load_weights
from isotron.core.errors import refuse
from isotron.core.mesh import AXES, Mesh
from isotron.core.parallel.model import ParallelModel
from isotron.hub.folder import end_tokens
from isotron.hub.foreign import foreign_source, is_foreign
from isotron.hub.opened import ORIGIN
from isotron.inference.beam import search
from isotron.inference.config import Beams, Ending, EngineConfig, Sampling, Wish
from isotron.inference.engine import Engine
from isotron.inference.pairs import PairEngine
from isotron.inference.row import Row
from isotron.inference.session import find_step, session, without_training
from isotron.tokenizers.base import Tokenizer
from isotron.tokenizers.build import build_tokenizer, load_tokenizer
from isotron.tokenizers.config import DESCRIPTOR, TokenizerConfig
from isotron.tokenizers.null import NullTokenizer

SENTINEL = re.compile(r"(<extra_id_[0-9]{1,9}>)")  # what stands for a masked span in a text
DEFAULTS: dict[str, Any] = {
    "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (),
    "stop": (), "stop_ids": (), "n": 1, "best_of": 0, "logprobs": 0, "num_beams": 1, "length_penalty": 1.0,
    "early_stopping": False, "grammar": None, "max_batch": 32, "page": 64, "chunk": 512, "prefix_reuse": True,
    "speculate": "auto", "lookahead": 0, "draft": "",
}  # fmt: skip


def main(config: RunConfig, options: Mapping[str, Any]) -> int:
    """Continue the prompts and print them on rank 0; returns the exit code.

    `config`: the checkpoint's run with `load`, the layout (tp, pp), device and dtype of this command. `options`:
    prompts, max_new_tokens, temperature, top_k, top_p, seed, ignore_eos, json, and those of DEFAULTS.
    A model from Hugging Face ends at every token that its generation config names, and begins as its tokenizer says.
    """
    options = {**DEFAULTS, **options}
    with session(config) as rank:
        step = rank.step
        engine = open_engine(rank.config, step, rank.mesh, rank.device, engine_config(options), options["draft"])
        if rank.speaks and isinstance(engine, PairEngine):
            print(
                "".join(unknown_sentinels(_tokenizer(engine), options["prompts"])), end="", file=sys.stderr, flush=True
            )
        origin = step if is_foreign(step) else step / ORIGIN
        results = continue_texts(engine, {**options, "ends": end_tokens(origin), "origin": origin.is_dir()})
        if rank.speaks:
            print(as_json(step, results) if options["json"] else as_text(results), flush=True)
        return 0


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The engine that the options ask for."""
    names = {"rows": "max_batch", "reuse": "prefix_reuse"}
    fields = ("rows", "page", "chunk", "reuse", "speculate", "lookahead")
    return EngineConfig(**{f: options[names.get(f, f)] for f in fields})


def open_engine(
    config: RunConfig, step: Path, mesh: Mesh, device: Any, how: EngineConfig | None = None, draft: str = ""
) -> Engine:
    """The model of a step or Hugging Face directory with its weights, in the layout of `config`, its tokenizer, and a
    draft model from another directory."""
    foreign = is_foreign(step)
    tokenizer = foreign_tokenizer(config) if foreign else find_tokenizer(config, step, read_manifest(step))
    model = loaded_model(with_sizes(config, tokenizer), step, mesh, device)
    if getattr(config.model, "two_streams", False):
        return PairEngine(model, tokenizer, how)
    smaller = None
    if draft:
        found = find_step(draft, mesh.group(*AXES), "--draft")
        base = config_of(found)
        same = {"tp": config.layout.tp, "pp": config.layout.pp, "dp": 1, "dtype": config.train.dtype, "ep": 1, "etp": 0}
        base = changed(base, **same, sequence_parallel=False)
        base = without_training(base)
        smaller = loaded_model(with_sizes(base, tokenizer), found, mesh, device)
    return Engine(model, tokenizer, how, smaller)


def config_of(step: Path) -> RunConfig:
    """The run that wrote a step, or what a Hugging Face directory describes."""
    found = find_checkpoint(str(step), "", lambda line: None)
    return read([], found.config).config


def loaded_model(config: RunConfig, step: Path, mesh: Mesh, device: Any) -> ParallelModel:
    """A model with the weights of a step or of a Hugging Face directory."""
    dtype = devices.dtype_of(config.train.dtype)
    model = ParallelModel(config.model, config.layout, mesh, dtype, device, config.train.seed)
    source = foreign_source(step, check_head=mesh.rank == 0) if is_foreign(step) else Source(step)
    load_weights(model, source)
    source.close()
    return model


def foreign_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer that the command or the directory names, else ids as text."""
    if config.tokenizer == TokenizerConfig():
        return NullTokenizer(config.model.vocab_size)
    return build_tokenizer(config.tokenizer, config.model.vocab_size)


def with_sizes(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """The config with what a run may have left to its tokenizer and its data."""
    return changed(
        config,
        vocab_size=config.model.vocab_size or tokenizer.vocab_size,
        max_position_embeddings=config.model.max_position_embeddings or config.data.seq_length,
    )


def find_tokenizer(config: RunConfig, step: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer that the command names, else the one stored in the checkpoint, else ids as text."""
    saved = manifest.meta.get("config")
    trained_with = from_dict(saved).tokenizer if isinstance(saved, Mapping) else TokenizerConfig()
    stored = step / "tokenizer"
    if config.tokenizer == trained_with and (stored / DESCRIPTOR).is_file():
        return load_tokenizer(stored)
    if config.tokenizer.tokenizer_type == "auto" and config.tokenizer == TokenizerConfig():
        return NullTokenizer(config.model.vocab_size)  # a run on mock data has none
    return build_tokenizer(config.tokenizer, config.model.vocab_size)


# ---- texts ---------------------------------------------------------------------------------------------------------


def continue_texts(engine: Engine, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per answer: prompt, text (its continuation), tokens, logprobs, prompt_tokens, finish_reason."""
    prompts: Sequence[str] = options["prompts"]
    tokenizer = _tokenizer(engine)
    wish = wish_of(options, engine.ends(options.get("ends")))
    if isinstance(engine, PairEngine):
        sources = [[*source_of(tokenizer, text), *end_of_source(tokenizer, options)] for text in prompts]
        pairs = zip(prompts, sources, engine.answer(sources, wish), strict=True)
        return [written(tokenizer, prompt, source, row) for prompt, source, rows in pairs for row in rows]
    first = list(tokenizer.prefix) if options.get("origin") else []
    ids = [first + row for row in tokenizer.encode_batch(list(prompts))]
    if options["num_beams"] > 1:
        beams = Beams(options["num_beams"], options["length_penalty"], options["early_stopping"])
        answers = search(engine, ids, wish, beams)
    else:
        answers = engine.answer(ids, wish)
    return [_described(tokenizer, prompt, row) for prompt, rows in zip(prompts, answers, strict=True) for row in rows]


def wish_of(options: Mapping[str, Any], ends: frozenset[int]) -> Wish:
    """The request that the options describe; `ends` are the tokens that end a document."""
    choice = {name: options[name] for name in Sampling.__dataclass_fields__}
    stops = frozenset(options["stop_ids"]) | (frozenset() if options["ignore_eos"] else ends)
    ending = Ending(options["max_new_tokens"], stops, tuple(options["stop"]))
    tops = options["logprobs"]
    return Wish(Sampling(**choice), ending, options["n"], options["best_of"], True, tops, options["grammar"])


def _tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise refuse("texts without a tokenizer", "it turns them into tokens and back", "Engine(model, tokenizer)")
    return engine.tokenizer


def _described(tokenizer: Tokenizer, prompt: str, row: Row) -> dict[str, Any]:
    new, given = row.new, row.tokens[: row.prompt]
    ended = row.reason == "stop" and bool(new) and new[-1] in row.wish.ending.stop_ids
    text = row.text.whole if row.text is not None else continuation(tokenizer, given, new[:-1] if ended else new)
    found = {
        "prompt": prompt,
        "text": text,
        "prompt_tokens": given,
        "tokens": new,
        "logprobs": row.logprobs,
        "finish_reason": row.reason,
    }
    return {**found, "top_logprobs": row.tops} if row.wish.tops else found


def source_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt for an encoder; `<extra_id_N>` is the sentinel of that number, where there is one."""
    known: Sequence[int] = getattr(tokenizer, "extra_ids", ())
    ids: list[int] = []
    for piece in SENTINEL.split(text) if known else [text]:
        number = int(piece[10:-1]) if SENTINEL.fullmatch(piece) else len(known)
        ids += [known[number]] if number < len(known) else tokenizer.encode(piece) if piece else []
    return ids


def unknown_sentinels(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[str]:
    """A line for each word that looks like a sentinel and is none of this tokenizer's: it is read as text."""
    known = len(getattr(tokenizer, "extra_ids", ()))
    words = dict.fromkeys(word for text in prompts for word in SENTINEL.findall(text) if int(word[10:-1]) >= known)
    has = f"<extra_id_0> to <extra_id_{known - 1}>" if known else "none"
    return [f"warning: {word} is read as text, the sentinels of the tokenizer are: {has}\n" for word in words]


def end_of_source(tokenizer: Tokenizer, options: Mapping[str, Any]) -> list[int]:
    """What ends the text that an encoder reads: as in training, or as the directory of the model says."""
    own = tokenizer.eod if tokenizer.eos is None else tokenizer.eos
    return [next(iter(options.get("ends") or (own,)))]


def written(tokenizer: Tokenizer, prompt: str, source: list[int], row: Row) -> dict[str, Any]:
    """An answer that a decoder wrote about a prompt: text, tokens, logprobs, prompt_tokens, finish_reason; `written`
    says that the text stands by itself.
    """
    new = row.new
    ended = row.reason == "stop" and bool(new) and new[-1] in row.wish.ending.stop_ids
    text = row.text.whole if row.text is not None else tokenizer.decode(new[:-1] if ended else new)
    about = {"prompt": prompt, "text": text, "prompt_tokens": source, "tokens": new, "logprobs": row.logprobs}
    return {
        **about,
        "finish_reason": row.reason,
        "written": True,
        **({"top_logprobs": row.tops} if row.wish.tops else {}),
    }


def continuation(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text of `new` as it stands after `prompt`; decoded alone, its first space might be lost."""
    before, whole = tokenizer.decode(prompt) if prompt else "", tokenizer.decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


def as_text(results: Sequence[Mapping[str, Any]]) -> str:
    """Each prompt with its continuation, or what was written about it alone; an empty line between them."""
    return "\n\n".join(("" if r.get("written") else r["prompt"]) + r["text"] for r in results)


def as_json(step: Path, results: Sequence[Mapping[str, Any]]) -> str:
    """One object: the checkpoint and the results in the order of the prompts."""
    return json.dumps({"checkpoint": str(step), "results": list(results)}, ensure_ascii=False)
