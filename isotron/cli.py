"""`isotron VERB`: one table of verbs; each imports only what it needs.

A verb's function takes the words after the verb and returns the exit code: 0 done and saved, 2 a request that can be
corrected, 1 a run that failed. What is wrong is printed to stderr as three lines: asked, but, try.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from isotron import __version__, birth
from isotron.config.argv import clean_words
from isotron.config.tables import nearest
from isotron.core.errors import Refused, refuse, refuse_file

# Ranks of a launcher find the same problems; the first one says them, and its exit makes the launcher end the others.
# A rank that is still there after this time has a problem of its own.
SECONDS_FOR_FIRST_RANK = 10.0


@dataclass(frozen=True)
class Verb:
    """One command: what it does, an example, the function that does it and the one that shows its options.

    `large`: it holds a model, so its process is born for that (`birth.py`).
    """

    line: str
    example: str
    run: str
    help: str
    large: bool = False


VERBS: dict[str, Verb] = {
    "preprocess": Verb(
        "text to tokens: JSON lines in, .bin/.idx out",
        "isotron preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer-model tokenizer.json",
        "isotron.commands.preprocess:run",
        "isotron.commands.preprocess:help_text",
    ),
    "train": Verb(
        "train a model on any layout, resume from a checkpoint",
        "isotron train --config run.toml --tp 2 --pp 2 --save runs/first",
        "isotron.commands.train:run",
        "isotron.commands.train:help_text",
        large=True,
    ),
    "finetune": Verb(
        "train on from the weights of a model, ours or Hugging Face's",
        "isotron finetune --load my_model --data-path texts/ --tp 2 --save runs/tuned",
        "isotron.commands.finetune:run",
        "isotron.commands.finetune:help_text",
        large=True,
    ),
    "generate": Verb(
        "continue prompts with a trained model",
        'isotron generate --load runs/first --prompt "Once upon a time" --max-new-tokens 50 --temperature 0',
        "isotron.commands.generate:run",
        "isotron.commands.generate:help_text",
        large=True,
    ),
    "serve": Verb(
        "an OpenAI-compatible server for a trained model, with a chat page",
        "isotron serve --load runs/first --port 8000",
        "isotron.commands.serve:run",
        "isotron.commands.serve:help_text",
        large=True,
    ),
    "evaluate": Verb(
        "perplexity and accuracy on tasks, in any layout",
        "isotron evaluate --load runs/first --task lambada=lambada_test.jsonl wikitext103=wiki.test.tokens",
        "isotron.commands.evaluate:run",
        "isotron.commands.evaluate:help_text",
        large=True,
    ),
    "score": Verb(
        "log-probability of every token, by the training forward and by the inference path",
        'isotron score --load runs/first --text "Once upon a time" --json',
        "isotron.commands.score:run",
        "isotron.commands.score:help_text",
        large=True,
    ),
    "convert": Verb(
        "a model from or to Hugging Face's format, streamed and checked",
        "isotron convert runs/first my_model --to hf",
        "isotron.commands.convert:run",
        "isotron.commands.convert:help_text",
    ),
    "compare": Verb(
        "two models on the same tokens: the first layer that differs, and by how much",
        "isotron compare my_model transformers",
        "isotron.commands.compare:run",
        "isotron.commands.compare:help_text",
    ),
    "verify": Verb(
        "your config, scaled down, in your layout against one process in float64",
        "isotron verify --config run.toml --tp 2 --pp 2",
        "isotron.commands.verify:run",
        "isotron.commands.verify:help_text",
    ),
    "schedule": Verb(
        "a pipeline schedule: its grid, bubble and memory, as picture, trace and table",
        "isotron schedule zbv --pp 4 --microbatches 8 --svg zbv.svg --trace zbv.json",
        "isotron.commands.schedule:run",
        "isotron.commands.schedule:help_text",
    ),
    "plan": Verb(
        "memory, time and the best layout before the cluster is booked",
        "isotron plan --model llama3-70b --gpus 64 --gpu h100 --seq 8192 --global-batch 512",
        "isotron.commands.plan:run",
        "isotron.commands.plan:help_text",
    ),
    "inspect": Verb(
        "what a checkpoint or a data set holds, and whether its files are whole",
        "isotron inspect runs/first --verify",
        "isotron.commands.inspect:run",
        "isotron.commands.inspect:help_text",
    ),
    "tokenizer": Verb(
        "train a tokenizer on a corpus, or look at one",
        "isotron tokenizer train --input corpus.jsonl --kind bpe --vocab-size 32000 --output my_tokenizer",
        "isotron.commands.tokenizer:run",
        "isotron.commands.tokenizer:help_text",
    ),
    "doctor": Verb(
        "what this machine has and can do",
        "isotron doctor --json",
        "isotron.commands.doctor:run",
        "isotron.commands.doctor:help_text",
    ),
}

NOT_BUILT: dict[str, str] = {
    "retrieval": "isotron train --family gpt",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    _open_standard_streams()
    words = clean_words(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words, is_process=argv is None)
    except Refused as refused:
        if not _first_rank():
            time.sleep(SECONDS_FOR_FIRST_RANK)
        report(refused)
        return refused.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        about = refuse_file(error)
        if about is None:
            raise
        report(about)
        return about.exit_code


def _open_standard_streams() -> None:
    """Closed ones (`>&-`, some schedulers) become /dev/null: else the next file that is opened takes their place. What
    one cannot spell (`PYTHONIOENCODING=ascii`) is written as an escape: a letter is no reason to end a run.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")


def report(refused: Refused) -> None:
    """Each problem as three lines on stderr; with ISOTRON_DEBUG the traceback before them."""
    if os.environ.get("ISOTRON_DEBUG"):
        traceback.print_exception(refused, file=sys.stderr)
    print("\n\n".join(map(str, refused.problems)), file=sys.stderr)


def _dispatch(words: list[str], is_process: bool) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        print(help_text())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"isotron {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        raise _no_verb(verb)
    from isotron.processes import check_platform, find

    if "--help" in rest or "-h" in rest:
        print(find(VERBS[verb].help)())
        return 0
    check_platform()
    if is_process and VERBS[verb].large:
        birth.start_again()
    return int(find(VERBS[verb].run)(rest))


def _no_verb(verb: str) -> Refused:
    if verb in NOT_BUILT:
        return refuse(f"isotron {verb}", f"{verb} is not built yet", NOT_BUILT[verb])
    close = nearest(verb, VERBS)
    fix = (
        f"isotron {close}"
        if close
        else f"isotron with one of {', '.join(VERBS)}; isotron --help shows an example of each"
    )
    return refuse(f"isotron {verb}", "there is no such verb", fix)


def _first_rank() -> bool:
    """Whether this process is the one of a launcher that speaks for all."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def help_text() -> str:
    """What `isotron --help` shows."""
    lines = ["isotron: write the model once; train it on any layout, on any device, and get the same numbers.", ""]
    for name, verb in VERBS.items():
        lines += [f"  {name:<12}{verb.line}", f"  {'':<12}{verb.example}", ""]
    lines += ["isotron VERB --help shows the options of a verb. Options may be spelled as in Megatron-LM."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
