"""Data for the recipes: from text files to the batches of a rank.

In reading order: `corpus` (sources of text), `hub` (a corpus from a Hugging Face dataset),
`tokenizer`, `token_blocks` (a tokenized corpus in a memory-mapped file), `token_data` (the
LightningDataModule), `shards` (ready-made files of tokens), `resumable` (a data loader that resumes
in the middle of an epoch), `cache`; for fine-tuning `examples`, `conversations`, `dialogues`,
`example_rows` and `example_data`.
"""
