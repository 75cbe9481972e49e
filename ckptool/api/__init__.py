"""ckptool in Python: what ``import ckptool`` offers, one file a part.

Everything here takes and returns plain values: options as keywords, called as on the command line,
and the commands' own reports. torch is imported when a torch tensor is asked for.
"""
