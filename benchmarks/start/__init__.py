"""How soon does a command say its first word?"""
