"""The common part of all commands that write: the transfer, its report, and overwriting."""
