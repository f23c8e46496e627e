"""Every tokenizer: ids against its own library, round trips, a copy in a checkpoint, and a worker process."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import pytest

from isotron.cli import main
from isotron.core.errors import Refused
from isotron.tokenizers import tiktoken_file
from isotron.tokenizers.base import Tokenizer
from isotron.tokenizers.build import build_tokenizer, load_tokenizer
from isotron.tokenizers.config import DESCRIPTOR, TokenizerConfig

ASSETS = Path(__file__).resolve().parents[2] / "assets"
VOCAB, MERGES = str(ASSETS / "gpt2" / "vocab.json"), str(ASSETS / "gpt2" / "merges.txt")
DEMO = str(ASSETS / "demo_tokenizer" / "tokenizer.json")
BOTCHAN = str(ASSETS / "sentencepiece" / "botchan_en_bpe_1000.model")
MISTRAL = str(ASSETS / "sentencepiece" / "mistral_v1_32k.model")
TEXTS = ["In the beginning God created the heaven", "naïve café 東京 \U0001f600", "a\n\n  b\t12345 it's"]


def gpt2_bytes() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte -> the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}


@pytest.fixture(scope="module")
def r50k(tmp_path_factory: pytest.TempPathFactory) -> str:
    """r50k_base.tiktoken, made from GPT-2's vocabulary: both hold the same tokens with the same ids."""
    table = gpt2_bytes()
    lines = []
    for token, rank in json.loads(Path(VOCAB).read_text(encoding="utf-8")).items():
        if token != "<|endoftext|>":
            lines.append(f"{base64.b64encode(bytes(table[c] for c in token)).decode()} {rank}")
    path = tmp_path_factory.mktemp("tiktoken") / "r50k_base.tiktoken"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(params=["gpt2", "huggingface", "botchan", "mistral", "tiktoken", "null"])
def tokenizer(request: pytest.FixtureRequest, r50k: str) -> Tokenizer:
    """One tokenizer of each kind, found by `auto` where it has files."""
    configs = {
        "gpt2": TokenizerConfig(vocab_file=VOCAB, merge_file=MERGES),
        "huggingface": TokenizerConfig(tokenizer_model=DEMO),
        "botchan": TokenizerConfig(tokenizer_model=BOTCHAN),
        "mistral": TokenizerConfig(tokenizer_model=MISTRAL),
        "tiktoken": TokenizerConfig(tokenizer_model=r50k),
        "null": TokenizerConfig(tokenizer_type="NullTokenizer"),
    }
    return build_tokenizer(configs[request.param], vocab_size=100)


def texts_for(tokenizer: Tokenizer) -> list[str]:
    return ["1 2 3", "98", "4 99"] if tokenizer.describe()["type"] == "NullTokenizer" else TEXTS


def test_round_trip_and_batch(tokenizer: Tokenizer) -> None:
    texts = texts_for(tokenizer)
    batch = tokenizer.encode_batch(texts)
    assert batch == [tokenizer.encode(text) for text in texts]
    assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for ids in batch for i in ids)
    lossy = tokenizer.vocab_size == 1000  # botchan has no byte fallback and folds white space
    assert tokenizer.decode(batch[0]) == texts[0]
    assert lossy or [tokenizer.decode(ids) for ids in batch] == texts
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


def test_saved_copy_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    texts = texts_for(tokenizer)
    assert again.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert again.describe() == tokenizer.describe()
    assert build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path))).describe() == tokenizer.describe()
    again.save(tmp_path)  # onto itself: nothing is lost
    assert load_tokenizer(tmp_path).describe() == tokenizer.describe()


def test_travels_to_a_worker_process(tokenizer: Tokenizer) -> None:
    text = texts_for(tokenizer)[0]
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == tokenizer.encode(text)


def test_sizes_and_ends() -> None:
    gpt2 = build_tokenizer(TokenizerConfig(vocab_file=VOCAB, merge_file=MERGES))
    assert (gpt2.vocab_size, gpt2.eod, gpt2.pad) == (50257, 50256, None)
    mistral = build_tokenizer(TokenizerConfig(tokenizer_model=MISTRAL))
    assert (mistral.vocab_size, mistral.bos, mistral.eod) == (32000, 1, 2)
    demo = build_tokenizer(TokenizerConfig(tokenizer_model=DEMO))
    assert (demo.vocab_size, demo.eod) == (4096, 0)
    null = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"), vocab_size=100)
    assert (null.vocab_size, null.eod) == (100, 99)


def test_gpt2_equals_tiktoken_and_transformers(r50k: str) -> None:
    gpt2 = build_tokenizer(TokenizerConfig(vocab_file=VOCAB, merge_file=MERGES))
    text = (ASSETS / "text" / "valid.jsonl").read_text(encoding="utf-8")[:40_000]
    ids = gpt2.encode(text)
    assert build_tokenizer(TokenizerConfig(tokenizer_model=r50k)).encode(text) == ids
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2TokenizerFast.from_pretrained(str(ASSETS / "gpt2"), local_files_only=True)
    assert theirs(text)["input_ids"] == ids
    assert gpt2.encode("a<|endoftext|>b")[1] == gpt2.eod


def test_sentencepiece_equals_its_library() -> None:
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=MISTRAL)
    ours = build_tokenizer(TokenizerConfig(tokenizer_model=MISTRAL))
    assert ours.encode_batch(TEXTS) == [theirs.encode(text) for text in TEXTS]
    assert ours.eod not in ours.encode("</s>")


def test_truncation_and_padding_of_a_tokenizer_json_are_off(tmp_path: Path) -> None:
    import tokenizers

    cut = tokenizers.Tokenizer.from_file(DEMO)
    cut.enable_truncation(4)
    cut.enable_padding(length=8)
    cut.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    ours = build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path)))
    assert ours.encode(TEXTS[0]) == build_tokenizer(TokenizerConfig(tokenizer_model=DEMO)).encode(TEXTS[0])


def test_special_tokens_come_from_the_files_beside(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(Path(DEMO).read_bytes())
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "!", "bos_token": "<|endoftext|>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    ours = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tmp_path)))
    assert (ours.bos, ours.eos, ours.eod, ours.pad) == (0, 7, 7, ours.encode("!")[0])
    ours.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").describe() == ours.describe()


def test_tiktoken_patterns_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {})
    for known in tiktoken_file.KNOWN.values():
        theirs = getattr(public, known.name)()
        assert theirs["pat_str"] == known.pattern
        assert theirs["special_tokens"] == dict(known.specials)


def test_tiktoken_text_never_gives_specials_and_unknown_ids_decode(r50k: str) -> None:
    ours = build_tokenizer(TokenizerConfig("TikTokenizer", r50k))
    assert ours.eod not in ours.encode("a<|endoftext|>b")
    assert ours.decode([ours.eod, 99999]) == "<|endoftext|>\ufffd"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (TokenizerConfig(), "none is given"),
        (TokenizerConfig(vocab_file=VOCAB), "--merge-file"),
        (TokenizerConfig(tokenizer_model=DEMO, vocab_file=VOCAB), "only one kind of file"),
        (TokenizerConfig(tokenizer_model="/nowhere/x.model"), "no such file: /nowhere/x.model"),
        (TokenizerConfig(tokenizer_model="/nowhere/x.xyz"), "tells no tokenizer"),
        (TokenizerConfig("HuggingFaceTokenizer"), "--tokenizer-model PATH"),
        (TokenizerConfig("WordPiece"), "the types are auto, GPT2BPETokenizer"),
        (TokenizerConfig("NullTokenizer"), "--vocab-size 32000"),
        (TokenizerConfig("GPT2BPETokenizer", "", str(ASSETS), MERGES), "it is a directory"),
    ],
)
def test_refused_options(config: TokenizerConfig, said: str) -> None:
    with pytest.raises(Refused, match="asked:") as refused:
        build_tokenizer(config)
    assert said in str(refused.value)


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer", "GPT2BPETokenizer"])
@pytest.mark.parametrize(("content", "said"), [(b"", "the file is empty"), (b"{broken", "")])
def test_empty_and_broken_files_name_their_path(kind: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    config = TokenizerConfig(kind, str(path), vocab_file=str(path), merge_file=MERGES)
    with pytest.raises(Refused) as refused:
        build_tokenizer(config)
    assert str(path) in str(refused.value) and said in str(refused.value)


def test_broken_content_is_told_apart(tmp_path: Path) -> None:
    short = tmp_path / "short.tiktoken"
    short.write_text("YQ== 0\nYg== 1\n")
    merges = tmp_path / "merges.txt"
    merges.write_text("#version: 0.2\nno such\n")
    lists, bare = tmp_path / "vocab.json", tmp_path / "bare.json"
    lists.write_text("[1]")
    bare.write_text('{"a": 0}')
    for config, said in (
        (TokenizerConfig(tokenizer_model=str(short)), "it has 2 ranks"),
        (TokenizerConfig(vocab_file=VOCAB, merge_file=str(merges)), "not a readable merges.txt"),
        (TokenizerConfig(vocab_file=str(lists), merge_file=MERGES), "one JSON object"),
        (TokenizerConfig(vocab_file=str(bare), merge_file=MERGES), "no entry <|endoftext|>"),
        (TokenizerConfig(tokenizer_model=str(tmp_path)), "the directory holds no"),
    ):
        if "directory" in said:
            lists.unlink()
        with pytest.raises(Refused) as refused:
            build_tokenizer(config)
        assert said in str(refused.value)


def test_tokenizer_json_without_an_end_is_refused(tmp_path: Path) -> None:
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(Refused, match="end-of-sequence"):
        build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path / "tokenizer.json")))


def test_changed_or_broken_checkpoint_copies_are_refused(tmp_path: Path) -> None:
    build_tokenizer(TokenizerConfig(tokenizer_model=BOTCHAN)).save(tmp_path)
    with pytest.raises(Refused, match="holds a SentencePieceTokenizer"):
        build_tokenizer(TokenizerConfig("TikTokenizer", str(tmp_path)))
    (tmp_path / "botchan_en_bpe_1000.model").write_bytes(Path(MISTRAL).read_bytes())
    with pytest.raises(Refused, match="another vocab_size, sha256"):
        load_tokenizer(tmp_path)
    (tmp_path / DESCRIPTOR).write_text("{}")
    with pytest.raises(Refused, match="not a readable tokenizer descriptor"):
        load_tokenizer(tmp_path)


def test_null_tokenizer_refuses_what_is_no_id() -> None:
    null = build_tokenizer(TokenizerConfig("NullTokenizer"), vocab_size=10)
    with pytest.raises(Refused, match="every word must be an id"):
        null.encode("1 two")
    with pytest.raises(Refused, match="--vocab-size 14"):
        null.encode("12")


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(Refused, match="pip install sentencepiece"):
        build_tokenizer(TokenizerConfig(tokenizer_model=BOTCHAN))


RUN = [
    "train",
    "--num-layers",
    "1",
    "--hidden-size",
    "8",
    "--num-attention-heads",
    "2",
    "--ffn-hidden-size",
    "8",
    "--seq-length",
    "8",
    "--eval-iters",
    "0",
    "--device",
    "cpu",
    "--mock-data",
    "--no-tensorboard",
]


@pytest.mark.parametrize("options", [("--tokenizer-model",), ("--vocab-file", "--merge-file")])
def test_a_run_whose_tokenizer_is_no_longer_what_it_was_goes_on_with_its_own_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """Grown, gone, unreadable: each time the advice is taken."""
    names = {"--tokenizer-model": "tokenizer.json", "--vocab-file": "vocab.json", "--merge-file": "merges.txt"}
    files = {option: tmp_path / names[option] for option in options}
    table = gpt2_bytes() | {"<|endoftext|>": 256}
    model = {"type": "BPE", "vocab": table, "merges": []}
    added = {"id": 256, "content": "<|endoftext|>", "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}  # fmt: skip

    def write(vocab: dict[str, int]) -> None:
        for option, path in files.items():
            whole = {"version": "1.0", "added_tokens": [added], "model": model | {"vocab": vocab}}
            path.write_text(
                "#version: 0.2\n" if "merge" in option else json.dumps(vocab if "vocab" in option else whole)
            )

    write(table)
    run = str(tmp_path / "run")
    words = [*RUN, *(word for option, path in files.items() for word in (option, str(path)))]
    assert main([*words, "--save", run, "--train-iters", "1"]) == 0
    for step, change in enumerate(("grown", "gone", "unreadable"), 1):
        if change == "grown":
            write(table | {"new": 257})
        for path in files.values() if change != "grown" else ():
            path.unlink() if change == "gone" else path.write_text("{")
        capsys.readouterr()
        again = [*words, "--load", run, "--save", run, "--train-iters", str(step + 1)]
        assert main(again) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(":")[0] for line in lines if line] == ["asked", "but", "try"], lines
        advice = lines[-1].removeprefix("try:").partition(",")[0].split()
        assert advice == ["--tokenizer-model", f"{run}/step_{step:08d}/tokenizer"]
        assert main([*again, *advice]) == 0
        assert f"resumed from {run}/step_{step:08d}" in capsys.readouterr().out
