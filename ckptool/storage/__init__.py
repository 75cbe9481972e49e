"""Where bytes are stored: disks, and stores behind URLs."""
