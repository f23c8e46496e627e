"""WordPiece, SentencePiece conventions, special ids, chat templates, and the verbs tokenizer and inspect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isotron import cli
from isotron.core.errors import Refused
from isotron.data.indexed_writer import IndexedWriter
from isotron.tokenizers.build import build_tokenizer, load_tokenizer
from isotron.tokenizers.chat import ChatTemplate, read_template
from isotron.tokenizers.config import TokenizerConfig

ASSETS = Path(__file__).resolve().parents[2] / "assets"
BERT = ASSETS / "bert" / "vocab.txt"
DEMO = ASSETS / "demo_tokenizer"
TEXTS = ["Naïve CAFÉ unbelievably 東京!", "[MASK] it's 12,5\u200b\x00 don't", "", "x" * 120]


def test_wordpiece_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = build_tokenizer(TokenizerConfig(vocab_file=str(BERT)))
    theirs = transformers.BertTokenizer.from_pretrained(str(BERT.parent), local_files_only=True)
    texts = [text for text in TEXTS if "[MASK]" not in text]
    assert ours.encode_batch(texts) == [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    about = ours.describe()
    assert [about[r] for r in ("pad", "unk", "cls", "sep", "mask", "eod")] == [0, 100, 101, 102, 103, 102]
    assert not {101, 102, 103} & set(ours.encode("[CLS] [SEP] [MASK]")) and ours.is_continuation(2000) is False  # type: ignore[attr-defined]
    ours.save(tmp_path)
    assert load_tokenizer(tmp_path).describe() == about
    assert build_tokenizer(TokenizerConfig(tokenizer_model=str(BERT.parent))).describe() == about


def test_cased_wordpiece_and_broken_vocabularies(tmp_path: Path) -> None:
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The", "the", "##s"]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(lines) + "\n")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    cased = build_tokenizer(TokenizerConfig(vocab_file=str(path)))
    assert cased.describe()["type"] == "BertWordPieceCase" and cased.encode("The thes") == [5, 6, 7]
    lower = build_tokenizer(TokenizerConfig("BertWordPieceLowerCase", "", str(path)))
    assert lower.encode("The") == [6]
    for text, said in (
        ("a\nb\n", "it has no [PAD], [UNK]"),
        ("\n".join([*lines, "the"]), "1 tokens stand there twice"),
    ):
        path.write_text(text)
        with pytest.raises(Refused) as refused:
            build_tokenizer(TokenizerConfig(vocab_file=str(path)))
        assert said in str(refused.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match="not a readable vocab.txt"):
        build_tokenizer(TokenizerConfig(vocab_file=str(path)))


def test_llama_and_t5_conventions(tmp_path: Path) -> None:
    def of(name: str) -> list[object]:
        made = build_tokenizer(TokenizerConfig(tokenizer_model=str(ASSETS / "sentencepiece" / name)))
        return [made.bos, made.eos, made.eod, made.pad, made.describe()["unk"], made.prefix]

    assert of("mistral_v1_32k.model") == [1, 2, 2, None, 0, (1,)]
    assert of("t5_layout_26.model") == [None, 1, 1, 0, 2, ()]
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    made.add_special_tokens(["<extra_id_0>", "<extra_id_1>"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path))).describe()["extra_ids"] == [4096, 4097]


def test_special_tokens_that_are_ordinary_or_absent_are_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(
        '{"pad_token": "<", "eos_token": "<|endoftext|>", "mask_token": "[M]"}'
    )
    made = build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path)))
    assert made.notes == (
        f"tokenizer: pad is '<', id {made.pad}: an ordinary token, which text produces too",
        "tokenizer: mask is '[M]', which the vocabulary does not have: there is no mask",
    )
    assert build_tokenizer(TokenizerConfig(tokenizer_model=str(DEMO))).notes == ()


CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "Who art thou?"},
    {"role": "assistant", "content": "A king."},
    {"role": "user", "content": "And he?"},
    {"role": "assistant", "content": "None."},
]


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    config = {"eos_token": "<|endoftext|>", "chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_answers_are_what_carries_loss(chat: Path) -> None:
    template, tokenizer = read_template(chat), build_tokenizer(TokenizerConfig(tokenizer_model=str(chat)))
    assert template is not None
    made = template.encode(TALK, tokenizer)
    assert tokenizer.decode(made.ids.tolist()) == template.render(TALK)
    answers = tokenizer.decode(made.ids[made.answers].tolist())
    assert answers == "A king.<|endoftext|>None.<|endoftext|>"  # with the token that ends each
    prompt = template.render(TALK[:2], answer_next=True)
    assert made.ids[: len(tokenizer.encode(prompt))].tolist() == tokenizer.encode(prompt)


def test_templates_render_as_in_transformers(chat: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(chat), local_files_only=True)
    template = read_template(chat)
    assert template is not None
    for last in (False, True):
        text = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=last)
        assert template.render(TALK, answer_next=last) == text
    (chat / "chat_template.jinja").write_text("{{ messages | tojson }}")
    other = read_template(chat)
    assert other is not None and other.render(TALK[:1]) == json.dumps(TALK[:1])
    assert read_template(DEMO) is None


def test_templates_that_cannot_be_used_are_refused(chat: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=str(chat)))
    with pytest.raises(Refused, match="no Jinja template"):
        ChatTemplate("{% for", {}, "x")
    with pytest.raises(Refused, match="answer 2 does not follow"):
        ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", {}, "x").encode(
            TALK, tokenizer
        )
    with pytest.raises(Refused, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "x").render(TALK)
    with pytest.raises(Refused, match="does not take a conversation"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}, "x").render(TALK)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_a_tokenizer(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input", str(ASSETS / "text" / "valid.jsonl"), "--kind", kind, "--vocab-size", "600"]
    for name in ("a", "b"):
        options = [*words, "--output", str(tmp_path / name), "--max-documents", "3", "--special-tokens", "<pad>"]
        assert cli.main(["tokenizer", "train", *options, "--json"]) == 0
    made_anew = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made_anew["vocab_size"] == 600 and not made_anew["replaced"]
    if kind == "bpe":  # Unigram's rounds of expectation are summed in threads
        assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    made = build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path / "a")))
    for text in ("naïve 東京 \U0001f600\n\n  king's", "<pad>"):
        assert made.decode(made.encode(text)) == text
    assert (made.vocab_size, made.eod, made.encode("<pad>")) == (600, 0, [1])
    assert cli.main(["tokenizer", "inspect", "--tokenizer-model", str(tmp_path / "a"), "--text", "the king"]) == 0
    said = capsys.readouterr().out
    assert cli.main(["tokenizer", "train", *words, "--output", str(tmp_path / "a"), "--max-documents", "1"]) == 0
    assert capsys.readouterr().out.endswith(", in place of the one that was there\n")
    assert "HuggingFaceTokenizer, 600 entries" in said and "eod 0 '<|endoftext|>'" in said and "'the king': " in said


def test_refusals_of_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(ASSETS / "text" / "valid.jsonl")
    for words, said in (
        ([], "the actions are train, inspect"),
        (["train"], "--output not given"),
        (["train", "--input", text, "--output", str(tmp_path / "x"), "--vocab-size", "100"], "need 257 entries"),
        (["train", "--input", text, "--output", str(tmp_path / "x"), "--json-keys", "body"], "no key 'body'"),
        (["inspect"], "none is given"),
    ):
        assert cli.main(["tokenizer", *words]) in (1, 2)
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    (tmp_path / "a.jsonl").write_text('{"text": " "}\n')
    assert cli.main(["tokenizer", "train", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "x")]) == 1
    assert "no text to learn from" in capsys.readouterr().err


def test_inspecting_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = build_tokenizer(TokenizerConfig(tokenizer_model=str(DEMO)))
    prefix = tmp_path / "a_text_document"
    with IndexedWriter(prefix, made.vocab_size) as writer:
        for text in ("the king", "the queen and the king", "a " * 100):
            writer.add_document([*made.encode(text), made.eod])
        writer.add_document([1, 2, 3], lengths=[1, 2])
    assert cli.main(["inspect", str(tmp_path / "a"), "--tokenizer-model", str(DEMO), "--samples", "2"]) == 0
    said = capsys.readouterr().out
    assert f"{prefix}: 4 documents in 5 sequences" in said and "uint16" in said
    assert "document 0: 'the king<|endoftext|>'" in said and "document 3:" in said
    assert cli.main(["inspect", str(prefix) + ".idx", "--json"]) == 0
    (about,) = json.loads(capsys.readouterr().out)
    assert about["documents"] == 4 and sum(count for *_, count in about["histogram"]) == 4
    assert (
        about["tokens"] == sum(len(made.encode(t)) + 1 for t in ("the king", "the queen and the king", "a " * 100)) + 3
    )
    assert about["samples"][0][1] == [*made.encode("the king"), made.eod]
    assert cli.main(["inspect", str(tmp_path / "nothing")]) == 2 and "this is not" in capsys.readouterr().err


def test_sentinels_behind_the_vocabulary(tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_model=str(DEMO), vocab_extra_ids=3)
    made, plain = build_tokenizer(config), build_tokenizer(TokenizerConfig(tokenizer_model=str(DEMO)))
    assert (made.vocab_size, made.describe()["extra_ids"], made.eod) == (4099, [4096, 4097, 4098], plain.eod)
    ids = plain.encode("the king")
    assert made.encode("the king") == ids and made.encode_flat(["the king"])[0].tolist() == ids
    assert made.decode([4096, *ids, 4098]) == "<extra_id_0>the king<extra_id_2>"
    build, files = made.__reduce__()  # how it reaches a worker process
    assert build(*files).describe() == made.describe()
    made.save(tmp_path)
    assert load_tokenizer(tmp_path).describe() == made.describe()
    assert build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path))).vocab_size == 4099
    with pytest.raises(Refused, match="was stored with 3"):
        build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path), vocab_extra_ids=5))
    with pytest.raises(Refused, match="--vocab-extra-ids -1"):
        build_tokenizer(TokenizerConfig(tokenizer_model=str(DEMO), vocab_extra_ids=-1))
