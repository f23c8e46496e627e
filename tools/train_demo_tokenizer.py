"""Train the tokenizer of the demo: a byte-level BPE of 4096 entries on assets/text/train.jsonl.

    python tools/train_demo_tokenizer.py [OUTPUT_DIRECTORY]

The result is a function of the corpus; running it again gives the same file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ASSETS = Path(__file__).resolve().parent.parent / "assets"
VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"


def texts(path: Path) -> Iterator[str]:
    """The text of every document, in order."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def main(output: Path) -> None:
    """Train and write `output`/tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(ASSETS / "text" / "train.jsonl"), trainer)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    (output / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}) + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} entries -> {output / 'tokenizer.json'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS / "demo_tokenizer")
