"""The faster libraries give the ids of the usual ones: on random text, and (slow) on every code point of Unicode."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from isotron.tokenizers import fast
from isotron.tokenizers.base import FileTokenizer
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig
from isotron.tokenizers.fast import fast_bpe, is_plain_byte_level

OURS = Path(__file__).resolve().parents[2] / "assets"
MORE = Path(os.environ.get("ISOTRON_TEST_ASSETS", OURS))  # a directory with further vocabularies, where there is one
FILES = {
    "gpt2": (OURS / "gpt2" / "vocab.json", OURS / "gpt2" / "merges.txt"),
    "demo": (OURS / "demo_tokenizer" / "tokenizer.json",),
    "mistral": (OURS / "sentencepiece" / "mistral_v1_32k.model",),
    "botchan": (OURS / "sentencepiece" / "botchan_en_bpe_1000.model",),
    "unigram": (OURS / "sentencepiece" / "botchan_en_unigram_1000.model",),
    "t5": (OURS / "sentencepiece" / "t5_layout_26.model",),
    "r50k": (MORE / "tiktoken" / "r50k_base.tiktoken",),
    "bert": (OURS / "bert" / "vocab.txt",),
    "cl100k": (MORE / "tiktoken" / "cl100k_base.tiktoken",),
}


def tokenizer(name: str) -> FileTokenizer:
    files = FILES[name]
    if not all(path.is_file() for path in files):
        pytest.skip(f"{files[0].name} is not here")
    if len(files) == 2:
        return build_tokenizer(TokenizerConfig(vocab_file=str(files[0]), merge_file=str(files[1])))  # type: ignore[return-value]
    if files[0].name == "vocab.txt":
        return build_tokenizer(TokenizerConfig(vocab_file=str(files[0])))  # type: ignore[return-value]
    return build_tokenizer(TokenizerConfig(tokenizer_model=str(files[0])))  # type: ignore[return-value]


def documents(count: int) -> list[str]:
    with (OURS / "text" / "valid.jsonl").open(encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line, _ in zip(stream, range(count), strict=False)]


def fuzzed(count: int, seed: int) -> list[str]:
    """Text that splits in odd places: code points of all planes, white space, contractions, long words, real prose."""
    rng, prose = random.Random(seed), " ".join(documents(10))
    words = prose.split(" ")
    spaces = " \n\t\r\x0b\x0c\x1c\x85\xa0\u2028\u3000"
    odd = [
        "<|endoftext|>",
        "</s>",
        "<s>",
        "<unk>",
        "[MASK]",
        "\u2581",
        "\u0120",
        "'s",
        "'LL",
        "\r\n",
        "\n\n\n",
        "\u0345",
    ]

    def one(kind: int) -> str:
        size = rng.randrange(60)
        if kind == 0:
            planes = (
                range(0x250),
                range(0xD800),
                range(0xE000, 0x110000),
                range(0x300, 0x370),
                range(0x1F300, 0x1FA00),
            )
            return "".join(chr(rng.choice(rng.choice(planes))) for _ in range(size))
        if kind == 1:
            return "".join(rng.choice([rng.choice(words), rng.choice(odd), rng.choice(spaces)]) for _ in range(size))
        if kind == 2:
            return rng.choice(words) * rng.randrange(1, 200)
        if kind == 3:
            start = rng.randrange(len(prose))
            return prose[start : start + rng.randrange(500)]
        return "".join(rng.choice(spaces + "'sStTdDlLvVeErRmM1239aA.,!") for _ in range(size))

    return [one(n % 5) for n in range(count)]


@pytest.mark.parametrize("name", FILES)
def test_flat_ids_are_those_of_the_reference_on_fuzzed_text(name: str) -> None:
    ours = tokenizer(name)
    texts = ["", *documents(5), *fuzzed(2000, seed=len(name))]
    reference = ours.encode_batch(texts)
    flat, lengths = ours.encode_flat(texts)
    assert lengths.tolist() == [len(ids) for ids in reference]
    assert flat.tolist() == [i for ids in reference for i in ids]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "demo"])
def test_every_code_point_splits_as_in_the_reference(name: str) -> None:
    ours = tokenizer(name)
    points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for start in range(0, len(points), 4096):
        texts = ["".join(f"x{chr(c)}y 1{chr(c)}2 {chr(c)}!" for c in points[start : start + 4096])]
        assert ours.encode_flat(texts)[0].tolist() == ours.encode(texts[0]), hex(points[start])


def test_only_the_pattern_of_gpt2_is_handed_on() -> None:
    pytest.importorskip("gigatoken")
    gpt2, demo = tokenizer("gpt2"), tokenizer("demo")
    assert gpt2._fast is not None and demo._fast is not None  # type: ignore[attr-defined]
    plain = json.loads(demo._tokenizer.to_str())  # type: ignore[attr-defined]
    assert is_plain_byte_level(json.dumps(plain))
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": None},
        {"model": plain["model"] | {"ignore_merges": True}},
        {"model": plain["model"] | {"type": "Unigram"}},
        {"added_tokens": [{"id": 0, "content": "<x>", "lstrip": True}]},
    ):
        assert fast_bpe(json.dumps(plain | change), demo.encode) is None


def test_a_difference_or_another_version_leaves_the_work_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken")
    demo = tokenizer("demo")
    text = demo._tokenizer.to_str()  # type: ignore[attr-defined]
    assert fast_bpe(text, demo.encode) is not None
    assert fast_bpe(text, lambda t: [*demo.encode(t), 0]) is None
    monkeypatch.setattr(fast, "KNOWN_GOOD", ((0, 9),))
    assert fast_bpe(text, demo.encode) is None
    monkeypatch.setitem(__import__("sys").modules, "gigatoken", None)
    monkeypatch.setattr(fast, "KNOWN_GOOD", ((0, 10),))
    assert fast_bpe(text, demo.encode) is None


def test_what_it_remembers_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken")
    demo = tokenizer("demo")
    monkeypatch.setattr(fast, "RENEW", 100)
    quick = fast_bpe(demo._tokenizer.to_str(), demo.encode)  # type: ignore[attr-defined]
    assert quick is not None
    before = quick._encode
    assert [quick(t).tolist() for t in documents(3)] == demo.encode_batch(documents(3)) and quick._encode is not before
