"""From the command line to a checked configuration, with every refusal in one sentence.

In reading order: `application` (makes a command of a function), `checking` (finds wrong keys and
values), `schema` and `signatures` (which ones are legal), `sentences` (what to tell the user of an
error), `help` (the page of `--help`), `resolved` (printed, saved and read again).
"""
