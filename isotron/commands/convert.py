"""`isotron convert`: a model from one format to another, streamed and checked; Megatron's words for it work too."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON
from isotron.config.argv import Given, Parsed, parse
from isotron.config.catalogue import Option
from isotron.config.foreign import resumed_meta, saved_run
from isotron.core.errors import Problem, Refused

_DTYPES = ("", "float64", "float32", "bfloat16", "float16")
OWN = {
    "to": Option(
        "to",
        "str",
        "",
        "what DST will be; not needed to rewrite a Megatron checkpoint for --tp and --pp",
        choices=("isotron", "hf", "megatron"),
    ),
    "tp": Option("tp", "int", 1, "megatron: tensor-parallel size of the result"),
    "pp": Option("pp", "int", 1, "megatron: pipeline-parallel size of the result"),
    "ckpt_format": Option(
        "ckpt_format",
        "str",
        "",
        "megatron: torch has a file for each rank, torch_dist loads in any "
        "layout; empty means that of a Megatron source, else torch_dist",
        choices=("", "torch", "torch_dist"),
    ),
    "optimizer_state": Option(
        "optimizer_state",
        "str",
        "auto",
        "isotron, from Megatron's torch_dist: auto takes masters "
        "and moments where they can be read, need refuses otherwise",
        choices=("auto", "need", "drop"),
    ),
    "dtype": Option("dtype", "str", "", "cast to this type; empty keeps each tensor as it is", choices=_DTYPES),
    "file_bytes": Option("file_bytes", "int", 0, "largest file of tensors; 0 means 5 GB (hf) or 1 GB", unit="bytes"),
    **JSON,
}
# Megatron's converter: what each of its options means is in `_from_megatron`
MEGATRON = {
    "model_type": Option("model_type", "str", "GPT", "decoders are the only kind", choices=("GPT",)),
    "loader": Option("loader", "str", "", "format of --load-dir; seen from its files all the same"),
    "saver": Option("saver", "str", "", "isotron, hf, or core, which is Megatron's own"),
    "load_dir": Option("load_dir", "str", "", "SRC"),
    "save_dir": Option("save_dir", "str", "", "DST"),
    "target_tensor_parallel_size": Option("target_tensor_parallel_size", "int", 1, "--tp"),
    "target_pipeline_parallel_size": Option("target_pipeline_parallel_size", "int", 1, "--pp"),
    "target_expert_parallel_size": Option("target_expert_parallel_size", "int", 1, "no effect: any layout loads it"),
    "model_size": Option("model_size", "str", "", "no effect: read from config.json"),
    "checkpoint_type": Option("checkpoint_type", "str", "hf", "of the source", choices=("hf",)),
    "tokenizer_model": Option("tokenizer_model", "str", "", "no effect: copied from the source"),
    "true_vocab_size": Option("true_vocab_size", "int", 0, "real entries of a padded Megatron vocabulary"),
    "megatron_path": Option("megatron_path", "str", "", "no effect: nothing of Megatron is needed"),
    "max_queue_size": Option("max_queue_size", "int", 50, "no effect: there is no queue"),
    "no_checking": Option("no_checking", "bool", False, "no effect: the result is always checked"),
    "loader_transformer_impl": Option("loader_transformer_impl", "str", "", "no effect"),
    "saver_transformer_impl": Option(
        "saver_transformer_impl",
        "str",
        "",
        "whose names of norms a torch result has; empty means transformer_engine",
        choices=("", "local", "transformer_engine"),
    ),
}
_LOADERS = ("llama_mistral", "hf", "isotron", "core", "mcore", "megatron", "")
_SAVERS = {"hf": "hf", "isotron": "isotron", "core": "megatron", "mcore": "megatron", "megatron": "megatron"}


def run(words: Sequence[str]) -> int:
    """Convert as the words say; returns the exit code."""
    places = [w for w in _leading(words)]
    parsed = parse(words[len(places) :], {**OWN, **MEGATRON})
    problems = list(parsed.problems)
    source, result, to = _asked(parsed, places, problems)
    if problems:
        raise Refused(problems)
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    from isotron.hub.check import as_text
    from isotron.hub.convert import convert

    given = {k: g.value for k, g in parsed.given.items()}
    sizes = [given.get(a, given.get(f"target_{b}_parallel_size", 1)) for a, b in (("tp", "tensor"), ("pp", "pipeline"))]
    done = convert(
        source, result, to, run_meta, given.get("dtype", ""), given.get("file_bytes", 0), tp=sizes[0],
        pp=sizes[1], vocab_size=given.get("true_vocab_size", 0), optimizer_state=given.get("optimizer_state", "auto"),
        megatron={n: given.get(n, "") for n in ("ckpt_format", "saver_transformer_impl")},
    )  # fmt: skip
    if given.get("json"):
        print(json.dumps(asdict(done)))
        return 0
    print(as_text(done.lines))
    kept = f", {done.reused} of them from an earlier attempt" if done.reused else ""
    what = f"{done.tensors} tensors, {done.bytes:,} bytes, {done.files} files{kept}; read again and equal"
    print(f"\n{done.source} -> {done.result} ({done.format}, {done.family}): {what}")
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _leading(words: Sequence[str]) -> list[str]:
    """The words before the first option."""
    first = next((i for i, w in enumerate(words) if w.startswith("--")), len(words))
    return list(words[:first])


def _asked(parsed: Parsed, places: list[str], problems: list[Problem]) -> tuple[str, str, str]:
    """(source, result, format), with everything wrong about them."""
    given: Mapping[str, Given] = parsed.given
    source, result = (*places, *("",) * 2)[:2]
    source = source or (given["load_dir"].value if "load_dir" in given else "")
    result = result or (given["save_dir"].value if "save_dir" in given else "")
    to = given["to"].value if "to" in given else ""
    if "saver" in given:
        to = _SAVERS.get(given["saver"].value, given["saver"].value)
    example = "isotron convert SRC DST --to hf"
    if len(places) > 2 or not source or not result:
        problems.append(Problem("convert " + " ".join(places), "it takes one source and one result", example))
    rewriting = {"tp", "pp", "ckpt_format", "target_tensor_parallel_size", "target_pipeline_parallel_size"}
    if not to and not {"to", "saver"} & parsed.doubtful and not rewriting & given.keys():
        problems.append(Problem("--to not given", "the format of the result is not known", example))
    for name in ("tp", "pp", "target_tensor_parallel_size", "target_pipeline_parallel_size"):
        if name in given and given[name].value < 1:
            problems.append(Problem(given[name].source, "a size is 1 or more", f"--{name.replace('_', '-')} 1"))
    if to and to not in ("hf", "isotron", "megatron"):
        problems.append(Problem(f"--saver {to}", f"the savers are {', '.join(_SAVERS)}", "--saver isotron"))
    loader = given["loader"].value if "loader" in given else ""
    if loader not in _LOADERS:
        fix = "--loader hf with a Hugging Face directory, or --loader core with one of Megatron's"
        problems.append(Problem(f"--loader {loader}", "there is no such loader", fix))
    return source, result, to


def run_meta(opened: Any, tokenizer: str) -> dict[str, Any]:
    """What a converted checkpoint says of itself: the run that could follow, and the optimizer's state."""
    config = saved_run(opened.model, opened.dtype, tokenizer)
    if opened.trained is None:
        return {"config": config, "weights_only": True}
    return resumed_meta(config, opened.trained.args, opened.trained.updates, opened.trained.consumed)


def help_text() -> str:
    """The options of convert."""
    usage = "isotron convert SRC DST --to {isotron,hf,megatron}\n\nSRC: a run, a step, a Hugging Face directory "
    usage += "or a Megatron checkpoint. DST is new."
    groups = {"[command]": OWN.values(), "[as in Megatron's tools/checkpoint/convert.py]": MEGATRON.values()}
    return options_help(usage, groups)
