"""From the `[data]` options to the training and validation datasets. PURE.

Like Megatron: one prefix is read as it is; weighted prefixes are blended by shares of samples; several prefixes without
weights are blended by their sizes. Unlike Megatron, a run that asks such a blend for more than one epoch gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from isotron.core.errors import refuse
from isotron.data.blend import (
    ANSWERS,
    SUFFIX,
    SURPLUS,
    BlendedDataset,
    ChainedDataset,
    Sources,
    normalized,
    read_sources,
    targets,
)
from isotron.data.blend_order import blend_order
from isotron.data.config import DataConfig
from isotron.data.fim import FimDataset, fim_tokens
from isotron.data.gpt_dataset import Dataset, GPTDataset, split_documents
from isotron.data.index_cache import Expected, IndexCache
from isotron.data.indexed import IndexedDataset, idx_path
from isotron.data.info import read_info
from isotron.data.masking import Masking
from isotron.data.mock import MockDataset
from isotron.data.packed import PackedDataset
from isotron.data.parts import NAMES, check_part
from isotron.tokenizers.base import Tokenizer, other_files

Log = Callable[[str], None]
CACHE = "isotron_index_cache"
DRAWS_PER_S = 5e5  # samples of a blend that are put in order, measured on one core


@dataclass(frozen=True)
class _Request:
    """What all datasets of one build share."""

    config: DataConfig
    seed: int
    vocab_size: int
    eod: int | None
    log: Log
    label: str = ""
    tokenizer: Tokenizer | None = None
    masking: Masking | None = None
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of a stretch but one."""
        return self.config.seq_length if self.masking is None else self.masking.text - 1

    def open(self, prefix: str) -> IndexedDataset:
        """The pair at `prefix`, opened and checked once."""
        if prefix not in self.opened:
            _check_note(prefix, self)
            self.opened[prefix] = data = IndexedDataset(prefix)
            data.check()  # a wrong length would train on wrong tokens without a word
        return self.opened[prefix]

    def cache(self, prefix: str) -> IndexCache:
        """Where the indexes of `prefix` are kept."""
        given = self.config.data_cache_path
        return IndexCache(given or Path(prefix).absolute().parent / CACHE, self.log, required=bool(given))


def build_datasets(
    config: DataConfig,
    seed: int,
    num_samples: tuple[int, int],
    log: Log = print,
    *,
    vocab_size: int = 0,
    eod: int | None = None,
    label: str = "",
    tokenizer: Tokenizer | None = None,
    masking: Masking | None = None,
) -> tuple[Dataset | None, Dataset | None]:
    """(training, validation), each with at least the `num_samples` asked for it; None where 0 are asked for.

    Validation is also None when its part of the split is 0. vocab_size and eod of the tokenizer, where they are known,
    are checked against the data. `label` follows the name of the training data in the log. tokenizer: cuts texts for
    fill-in-the-middle. masking: samples are rows with masked words, or pairs with masked spans.
    """
    if not 0 <= seed < 2**32:
        raise refuse(f"--seed {seed}", "the data order needs a seed of 0..4294967295", "--seed 1234")
    request = _Request(config, seed, vocab_size, eod, log, label, tokenizer, masking)
    made = (
        _mock(request, num_samples) if config.mock_data else tuple(_build(request, i, num_samples[i]) for i in (0, 1))
    )
    if masking is None:
        return made[0], made[1]
    train, valid = (None if d is None else masking.dataset(d, seed, i) for i, d in enumerate(made))
    return train, valid


def build_segments(
    config: DataConfig,
    seed: int,
    segments: Sequence[int],
    num_valid: int,
    log: Log = print,
    *,
    vocab_size: int = 0,
    eod: int | None = None,
    consumed: int = 0,
    tokenizer: Tokenizer | None = None,
    masking: Masking | None = None,
) -> tuple[Dataset, Dataset | dict[str, Dataset] | None]:
    """(training, validation) of a run that may have been made longer, as `build_datasets` gives them.

    segments: the sample counts that the order was built for, oldest first. Each segment is what a run of that length
    has, with a seed of its own (seed, seed + 1, ...), so that making a run longer changes nothing of what it had.
    consumed: samples that are done, for the log.
    """
    parts: list[tuple[int, Dataset]] = []
    held_out: Dataset | None = None
    for i, count in enumerate(segments):
        together = 0 if i or config.multiple_validation_sets else num_valid
        wanted, label = (count, together), _label(segments, i, consumed)
        own = (seed + i) % 2**32
        known: dict[str, Any] = {"vocab_size": vocab_size, "eod": eod, "tokenizer": tokenizer, "masking": masking}
        known["label"] = label
        train, valid = build_datasets(config, own, wanted, log, **known)
        if train is None:
            raise ValueError(f"segments of {segments} samples: each has at least one")
        parts.append((count, train))
        held_out = held_out or valid
    if config.multiple_validation_sets and num_valid:
        return ChainedDataset(parts), _each_apart(config, seed, num_valid, log, {**known, "label": ""})
    return ChainedDataset(parts), held_out


def _each_apart(config: DataConfig, seed: int, count: int, log: Log, known: dict[str, Any]) -> dict[str, Dataset]:
    """A validation set for each prefix, by the name of its file."""
    sets: dict[str, Dataset] = {}
    for prefix in read_sources(config.valid_data_path, "--valid-data-path", log).prefixes:
        _, held_out = build_datasets(replace(config, valid_data_path=(prefix,)), seed, (0, count), log, **known)
        name = Path(prefix).name.removesuffix(SUFFIX)
        if held_out is not None:
            sets[f"valid/{name if f'valid/{name}' not in sets else prefix}"] = held_out
    return sets


def _label(segments: Sequence[int], i: int, consumed: int) -> str:
    """Which segment of a run that was made longer; nothing for a run of one segment."""
    if len(segments) == 1:
        return ""
    done = sum(segments[: i + 1]) <= consumed
    return f", segment {i + 1} of {len(segments)}{' (finished)' if done else ''}"


def count_sources(config: DataConfig) -> list[list[int]]:
    """[documents, tokens] of each prefix that training reads, in order; nothing for made-up data."""
    if config.mock_data or not config.data_path:
        return []
    sources = read_sources(config.data_path, "--data-path", lambda _: None)
    opened = [IndexedDataset(prefix) for prefix in sources.prefixes]
    return [[len(data), int(np.sum(data.lengths, dtype=np.int64))] for data in opened]


def _mock(request: _Request, counts: tuple[int, int]) -> tuple[Dataset | None, Dataset | None]:
    config = request.config
    if config.data_path or config.valid_data_path:
        paths = " ".join(config.data_path or config.valid_data_path)
        raise refuse(f"--mock-data with --data-path {paths}", "data is either made up or read", "one of the two")
    train, valid = (
        MockDataset(count, request.length, 2 * request.seed + part, request.vocab_size, request.eod)
        for part, count in enumerate(counts)
    )
    return train if counts[0] else None, valid if counts[1] else None


def _build(request: _Request, part: int, count: int) -> Dataset | None:
    """The dataset of one part (0 training, 1 validation)."""
    config = request.config
    if not config.data_path:
        also = f" with --valid-data-path {' '.join(config.valid_data_path)}" if config.valid_data_path else ""
        raise refuse(f"no --data-path{also}", "there is nothing to train on", "--data-path my_gpt, or --mock-data")
    if count <= 0:
        return None
    apart = bool(config.valid_data_path)
    option = "--valid-data-path" if apart and part == 1 else "--data-path"
    sources = read_sources(config.valid_data_path if option != "--data-path" else config.data_path, option, request.log)
    ranges = {}
    for prefix in sources.prefixes:
        count_all = len(request.open(prefix))
        ranges[prefix] = range(count_all) if apart else split_documents(config.split, count_all)[part]
    if not apart and part == 1 and not split_documents(config.split, 10**9)[1]:
        request.log(f"no validation: its part of --split {config.split} is 0")
        return None
    for prefix, documents in () if config.pack_documents else ranges.items():
        check_part(config, request.open(prefix), documents, part, request.length + 1)
    one = len(sources.prefixes) == 1 and (sources.weights is None or apart)
    make = _single if one else _by_size if sources.weights is None else _by_weight
    dataset = make(request, sources, [ranges[prefix] for prefix in sources.prefixes], count, NAMES[part])
    if part or not config.fim_rate:
        return dataset
    return _filling(request, dataset)


def _filling(request: _Request, dataset: Dataset) -> FimDataset:
    """The rows of `dataset`, rearranged as the options say."""
    config = request.config
    tokens, tokenizer = fim_tokens(config), request.tokenizer if config.fim_cut == "characters" else None
    if config.fim_cut == "characters" and tokenizer is None:
        asked = f"--fim-rate {config.fim_rate} --fim-cut characters"
        raise refuse(asked, "there is no tokenizer that knows the text", "--fim-cut tokens, or --tokenizer-model FILE")
    return FimDataset(dataset, tokens, request.eod, config.fim_rate, config.fim_spm_rate, request.seed, tokenizer)


def _gpt(request: _Request, prefix: str, documents: range, count: int | None) -> GPTDataset | PackedDataset:
    length, cache = request.length, request.cache(prefix)
    if request.config.pack_documents:
        return PackedDataset(
            request.open(prefix), documents, count, length, request.seed, request.vocab_size, request.log
        )
    if idx_path(prefix + ANSWERS).is_file():
        case = "it says which of its tokens are answers, which only rows of whole conversations keep to"
        raise refuse(f"--no-pack-documents with data {prefix}", case, "--pack-documents")
    return GPTDataset(request.open(prefix), documents, count, length, request.seed, cache, request.vocab_size)


def _single(request: _Request, sources: Sources, ranges: Sequence[range], count: int, name: str) -> Dataset:
    dataset = _gpt(request, sources.prefixes[0], ranges[0], count)
    _report(request, name, sources.prefixes, [1.0], [count], [dataset])
    return dataset


def _by_weight(request: _Request, sources: Sources, ranges: Sequence[range], count: int, name: str) -> Dataset:
    """A blend by given weights, over as many epochs of each source as its share takes."""
    shares = normalized(sources.weights or ())
    size, counts = sum(targets(shares, count)), targets(shares, count, SURPLUS)
    return _blend(request, sources, ranges, normalized(shares), counts, name, size)  # normalised twice, as Megatron


def _by_size(request: _Request, sources: Sources, ranges: Sequence[range], count: int, name: str) -> Dataset:
    """A blend by the samples in one epoch of each source; more than one epoch continues with the same shares."""
    sizes = [len(_gpt(request, p, r, None)) for p, r in zip(sources.prefixes, ranges, strict=True)]
    shares = normalized(sizes)
    if count <= sum(sizes):
        return _blend(request, sources, ranges, shares, [None] * len(sizes), name, count)
    return _blend(request, sources, ranges, shares, targets(shares, count, SURPLUS), name, count)


def _blend(
    request: _Request,
    sources: Sources,
    ranges: Sequence[range],
    shares: Sequence[float],
    counts: Sequence[int | None],
    name: str,
    size: int,
) -> Dataset:
    """`size` samples by `shares`; `counts` are built per source, or what the order draws where that is more."""
    cache = request.cache(sources.prefixes[0])
    order = cache.get(
        {"kind": "blend", "shares": list(shares), "size": size},
        Expected(10 * size, size / DRAWS_PER_S, f"{len(shares):,} sources, {size:,} samples"),
        lambda: dict(zip(("which", "within"), blend_order(shares, size), strict=True)),
    )
    drawn = np.bincount(order["which"], minlength=len(shares)).tolist()
    datasets: list[GPTDataset | PackedDataset] = []
    for prefix, documents, count, least in zip(sources.prefixes, ranges, counts, drawn, strict=True):
        dataset = _gpt(request, prefix, documents, count)
        datasets.append(dataset if len(dataset) >= least else _gpt(request, prefix, documents, least))
    _report(request, name, sources.prefixes, shares, drawn, datasets)
    return BlendedDataset(datasets, order["which"], order["within"])


def _report(
    request: _Request,
    name: str,
    prefixes: Sequence[str],
    shares: Sequence[float],
    drawn: Sequence[int],
    datasets: Sequence[GPTDataset | PackedDataset],
) -> None:
    """Say what will be read from where: shares of samples, tokens, and how often each source is gone through."""
    length = request.length + (request.masking is not None)  # what is masked has no label beyond the last token
    label = request.label if name == NAMES[0] else ""
    request.log(f"{name} data{label}: {sum(drawn):,} samples of {length} tokens")
    for prefix, share, count, dataset in zip(prefixes, shares, drawn, datasets, strict=True):
        epochs = count * length / dataset.tokens_per_epoch
        request.log(
            f"  share {share:8.3%}: {count:,} samples, {count * length:,} tokens, {epochs:.3g} epochs of {prefix}"
        )


def _check_note(prefix: str, request: _Request) -> None:
    """Refuse data that its note says was made for another tokenizer, or without what an option needs."""
    note = read_info(prefix)
    if note is None:
        return
    made = note.get("tokenizer", {})
    config = request.config
    size, eod = made.get("vocab_size"), made.get("eod")
    if request.vocab_size and isinstance(size, int) and size > request.vocab_size:
        case = f"it was preprocessed with {size} entries ({made.get('type')}), the vocabulary has {request.vocab_size}"
        raise refuse(f"data {prefix}", case, "the tokenizer that the data was preprocessed with")
    if request.eod is not None and isinstance(eod, int) and eod != request.eod:
        case = f"its documents end with id {eod}, the tokenizer's end of document is {request.eod}"
        raise refuse(f"data {prefix}", case, "the tokenizer that the data was preprocessed with")
    if request.tokenizer is not None and (other := other_files(made, request.tokenizer)):
        request.log(f"data {prefix} was preprocessed with another tokenizer, by its note: {other}")
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    asked = [f"--{name.replace('_', '-')}" for name in names if getattr(config, name)]
    if asked and note.get("append_eod") is False:
        case = "its documents have no end-of-document id to go by"
        raise refuse(f"{' '.join(asked)} with data {prefix}", case, "isotron preprocess with --append-eod")
