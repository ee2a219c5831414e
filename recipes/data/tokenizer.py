"""Tokenizers, all in Hugging Face's format, so that every run can export them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import PositiveInt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.data.cache import build_once, cache_key
from recipes.data.corpus import Corpus
from recipes.stages import stage

END_OF_TEXT = "<|endoftext|>"
BYTE_VOCAB_SIZE = 257  # 256 bytes and the end of text


def train_bpe(corpus: Corpus, vocab_size: PositiveInt, cache_dir: str) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE like GPT-2's on the training text of a corpus, with a cache.

    Args:
        corpus: only its training split is read.
        vocab_size: number of tokens, including the 256 bytes and the end of text.
        cache_dir: folder for the trained tokenizer.

    Raises:
        ValueError: `vocab_size` is too small for the bytes.
    """
    if vocab_size < BYTE_VOCAB_SIZE:
        raise ValueError(
            f"tokenizer.vocab_size={vocab_size} must be at least {BYTE_VOCAB_SIZE}: a byte-level"
            " BPE starts from 256 bytes and the end of text. To do without merges use"
            " `tokenizer=bytes`."
        )
    folder = Path(cache_dir) / f"bpe-{vocab_size}-{cache_key(corpus.fingerprint(), vocab_size)}"

    def build(folder: Path) -> None:
        with stage("training the tokenizer"):
            _byte_level_bpe(corpus.documents("train"), vocab_size).save_pretrained(folder)

    return PreTrainedTokenizerFast.from_pretrained(build_once(folder, build))


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with the 256 bytes and an end of text as tokens."""
    return _byte_level_bpe(iter(()), BYTE_VOCAB_SIZE)


def pretrained_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer by Hugging Face id or from a folder.

    Raises:
        ValueError: it cannot be found, or has no vocabulary.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer.name_or_path='{name_or_path}' is neither a folder with a saved tokenizer"
            " nor an id that could be loaded from the Hugging Face hub or its local cache (without"
            " a network, or with HF_HUB_OFFLINE=1, only folders and ids loaded before are found)."
        ) from error
    if len(tokenizer) < 2:
        # transformers 5 silently returns an empty tokenizer for a folder with unknown files
        raise ValueError(
            f"tokenizer.name_or_path='{name_or_path}' gave a vocabulary of {len(tokenizer)}. The"
            " folder must hold what `save_pretrained` writes (tokenizer.json and"
            " tokenizer_config.json)."
        )
    return tokenizer


def _byte_level_bpe(documents: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )
