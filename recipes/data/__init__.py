"""From text files to the batches of a rank.

In reading order: `corpus` (where text comes from), `tokenizer`, `token_blocks` (a corpus as one row
of tokens in a memory-mapped file), `token_data` (the LightningDataModule), `resumable` (a loader
that knows where it is), `cache`.
"""
