"""Options of the training data: the config section `[data]`. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.options import option


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from and how rows are cut."""

    data_path: tuple[str, ...] = option((), "prefix of a .bin/.idx pair, or weight prefix weight prefix ...")
    valid_data_path: tuple[str, ...] = option((), "separate data for validation; then data_path is all training data")
    multiple_validation_sets: bool = option(False, "evaluate on each prefix of valid_data_path by itself")
    split: str = option("969,30,1", "parts of data_path for training, validation and test")
    seq_length: int = option(1024, "tokens per sequence", unit="tokens")
    data_cache_path: str = option("", "where built indexes are kept; empty means beside the data")
    mock_data: bool = option(False, "train on made-up token sequences instead of files")
    eod_mask_loss: bool = option(False, "no loss on positions whose input token is end-of-document")
    reset_position_ids: bool = option(False, "positions start again after each end-of-document")
    reset_attention_mask: bool = option(False, "documents in one row do not attend to each other")
    pack_documents: bool = option(False, "rows of whole documents, isolated and padded, instead of one long stream")
    fim_rate: float = option(0.0, "share of documents that are rearranged for fill-in-the-middle; 0 means none")
    fim_spm_rate: float = option(0.5, "share of the rearranged documents that begin with the suffix")
    fim_cut: str = option(
        "characters", "where they are cut: anywhere in their text, or between tokens", choices=("characters", "tokens")
    )
    fim_token_ids: tuple[int, ...] = option((), "ids of the prefix, middle and suffix tokens of fill-in-the-middle")
    mask_prob: float = option(0.15, "share of a text that is masked, in families with an encoder")
    mask_replace_prob: float = option(0.8, "share of masked words that the mask stands for (BERT)")
    random_replace_prob: float = option(0.1, "share of masked words that any word of the vocabulary stands for (BERT)")
    mask_token_id: int = option(-1, "id of the mask (BERT); -1 means the tokenizer's [MASK], or its first extra id")
    short_seq_prob: float = option(0.0, "share of rows that are cut short at random and padded (BERT)")
    mean_span_length: float = option(3.0, "tokens of a masked span on average", unit="tokens")
    sentinel_ids: tuple[int, ...] = option(
        (), "ids that stand for masked spans, first to last; empty means the tokenizer's extra ids"
    )
