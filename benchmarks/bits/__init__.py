"""How fast are codes packed and unpacked, against copying them?"""
