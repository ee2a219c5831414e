"""From text files to the batches of a rank.

In reading order: `corpus` (where text comes from), `hub` (a Hugging Face dataset as one),
`tokenizer`, `token_blocks` (a corpus as one row of tokens in a memory-mapped file), `token_data`
(the LightningDataModule), `shards` (ready-made files of tokens), `resumable` (a loader that knows
where it is), `cache`.
"""
