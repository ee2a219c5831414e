"""The gain from one socket per direction when two ranks send at the same time."""
