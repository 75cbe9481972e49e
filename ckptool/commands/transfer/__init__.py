"""What all commands that write have in common: the transfer, its report, what it may replace."""
