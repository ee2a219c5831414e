"""Measurements that anybody can repeat: each module is a command and prints what it found."""
