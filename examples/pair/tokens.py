"""Text to tokens: a byte-level BPE tokenizer, and one long row of ids with file ends in it."""

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: list[bytes], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of `vocab_size` entries; entry 0 ends a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: list[bytes]) -> list[np.ndarray]:
    """Each text's ids, between two ends of text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    rows = []
    for start in range(0, len(texts), 512):
        batch = [text.decode() for text in texts[start : start + 512]]
        for encoding in tokenizer.encode_batch(batch):
            rows.append(np.array([end, *encoding.ids, end], np.int32))
    return rows


def one_row(rows: list[np.ndarray], seed: int) -> np.ndarray:
    """All texts in a shuffled order, one end of text between neighbours."""
    order = np.random.default_rng(seed).permutation(len(rows))
    return np.concatenate([rows[i][:-1] for i in order] + [rows[order[-1]][-1:]])


def windows(rows: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Every text cut into windows that overlap by half, so that each target has context.

    Returns:
      i32[N, length + 1] ids padded with the end of text, and bool[N, length]: which of
      ids[:, 1:] to judge, each token of each text once.
    """
    ids, judged = [], []
    for row in rows:
        for start in range(0, max(1, len(row) - 1 - length // 2), length // 2):
            piece = row[start : start + length + 1]
            padding = length + 1 - len(piece)
            mask = np.arange(length) < len(piece) - 1
            if start:
                mask &= np.arange(length) >= length // 2
            ids.append(np.pad(piece, (0, padding), constant_values=row[0]))
            judged.append(mask)
    return np.stack(ids), np.stack(judged)
