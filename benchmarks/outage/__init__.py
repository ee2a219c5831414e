"""A link is down for a while in the middle of a fit: does the fit go on?"""
