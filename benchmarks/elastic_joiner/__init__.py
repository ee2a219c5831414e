"""A joiner with a fresh inner optimizer."""
