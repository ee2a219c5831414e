"""The way into every recipe: Hydra's, with every key checked and every refusal in a sentence.

In reading order: `application` (makes a command of a function), `keys` (which keys somebody reads),
`values` and `ranges` (which values they take), `sentences` (what to tell the user of an error),
`help` (what may be chosen).
"""
