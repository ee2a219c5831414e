"""A resume early and late in an epoch."""
