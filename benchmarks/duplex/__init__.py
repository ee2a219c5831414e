"""What does a socket for each direction gain, where two ranks send at once?"""
