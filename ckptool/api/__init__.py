"""ckptool in Python: what ``import ckptool`` offers, one file per part.

Everything here takes and returns plain values: options as keywords with the names they have on the
command line, and the reports of the commands. torch is imported only when a torch tensor is
requested.
"""
