"""Where bytes lie: disks, and stores behind URLs."""
